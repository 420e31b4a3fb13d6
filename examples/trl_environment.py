"""TRL's own GRPO trainer on hintloop's environment: the bundled student, a few steps.

Start an environment server first, in another terminal:

    hintloop serve env --port 8000
    python examples/trl_environment.py http://127.0.0.1:8000 --steps 2

A model of yours that has a chat template needs none of what is here for the student: leave out ``processing_class``
and the system message, and TRL puts the tools' schemas into the prompt.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from hintloop.envs.registry import load_taskset
from hintloop.envs.tools import TOOL_PROMPT
from hintloop.envs.trl_environment import TrlEnvironment

STUDENT = Path(str(files("hintloop.agent.student"))) / "student-tiny"
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + "}\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
"""The student's: Qwen3's without the schemas, which would fill its context."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How TRL finds the tool calls in what the student says."""


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train, print the mean reward of each step, and return what TRL logged of it."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(STUDENT),
            processing_class=student_tokenizer(),
            args=_config(folder, options),
            train_dataset=task_rows(options.tasks),
            environment_factory=partial(TrlEnvironment, options.url),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry in logged:
        print(
            f"step {entry['step']}: reward {entry['reward']:.2f}, {entry['tools/call_frequency']:.1f} tool calls"
        )
    return logged


def student_tokenizer() -> PreTrainedTokenizerFast:
    """The student's tokenizer, told how the student talks."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(STUDENT)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def task_rows(number: int) -> Dataset:
    """Prompts for the first ``number`` training tasks; ``reset`` adds each task's instruction to its prompt."""
    prompt = [{"role": "system", "content": f"Tools: {TOOL_PROMPT}"}, {"role": "user", "content": ""}]
    tasks = load_taskset("bugfix").splits()["train"][:number]
    return Dataset.from_list([{"prompt": prompt, "task_id": task_id} for task_id in tasks])


def _config(folder: str, options: argparse.Namespace) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        max_steps=options.steps,
        learning_rate=1e-4,
        num_generations=options.group,
        per_device_train_batch_size=options.group,
        gradient_accumulation_steps=options.groups,
        max_completion_length=400,
        max_tool_calling_iterations=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="trl_environment.py",
    )
    parser.add_argument("url", help="environment server")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=4, help="episodes of each task")
    parser.add_argument("--groups", type=int, default=2, help="tasks in a step")
    parser.add_argument("--tasks", type=int, default=100, help="training tasks to draw from")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
