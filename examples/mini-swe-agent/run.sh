#!/bin/sh
# mini-swe-agent as the agent of hintloop: `hintloop rollout --agent "sh .../examples/mini-swe-agent/run.sh"`.
# MINI names its program where that is not on the search path: --agent "MINI=/opt/mini/bin/mini sh .../run.sh"
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
export PYTHONPATH="$here"                    # for hintloop_sandbox.py
export MSWEA_CONFIGURED=true                 # asks no questions at its first start
export MSWEA_SILENT_STARTUP=1
export MSWEA_COST_TRACKING=ignore_errors     # the model has no price
export MSWEA_GLOBAL_CONFIG_DIR="$HOME"
export LITELLM_LOCAL_MODEL_COST_MAP=True     # no list of prices from the network
exec "${MINI:-mini}" -y --exit-immediately -c mini.yaml -c "$here/hintloop.yaml" \
    -m "openai/$HINTLOOP_MODEL" -o "$HOME/trajectory.json" -t "$(cat "$HINTLOOP_TASK_FILE")"
