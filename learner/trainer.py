"""The three-channel trainer: TRL's GRPO loss, hint distillation and DPO in one optimizer step.

A ``trl.GRPOTrainer`` that generates nothing: its batches are finished ``StepBatch``es. Replaced are where
batches come from, the forward pass (one backbone pass gives all channels their hidden states, and the
vocabulary projection runs on the needed positions only) and the sum of the channels. The policy loss itself is
TRL's, with the recorded log-probabilities as the old policy. One process, one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from hintloop.learner.arguments import Once, recorded_reward, trl_arguments
from hintloop.learner.batch import StepBatch
from hintloop.learner.config import LearnerConfig
from hintloop.learner.losses.corrections import correction_weights
from hintloop.learner.losses.divergence import fused_generalized_jsd
from hintloop.learner.losses.head import Head
from hintloop.learner.losses.preference import dpo, response_logps
from hintloop.learner.losses.sdpo import trust_region
from hintloop.learner.models import SideWeights, Weights, backbone_states, reading
from hintloop.learner.packing import Packed, require_masks
from hintloop.learner.sharding import placement, whole
from hintloop.learner.stats import StepStats
from hintloop.learner.tensors import MicroBatch, states_at


class ThreeChannelTrainer(GRPOTrainer):
    """``L_grpo + alpha_sdpo L_sdpo + beta_replay L_dpo``, each over its own denominator of the whole step."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: LearnerConfig,
        batches: Iterable[StepBatch],
        *,
        side: SideWeights,
        optimizer: tuple[torch.optim.Optimizer, Any],
        output_dir: Path,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        """``batches`` is iterated once; training ends with it or after ``config.steps``.

        Started as one of several processes, each takes its share of every batch, and all make the same step.
        ``ValueError`` for a model that cannot take masks.
        """
        require_masks(model)
        self.learner_config = config
        self.student = model
        self.side = side
        self._placement = placement(model)
        self._weights = {"grpo": 1.0, "sdpo": config.alpha_sdpo, "dpo": config.beta_replay}
        self._batches = batches
        self._stats = StepStats()
        self._shared: tuple[Tensor, Tensor] | None = None
        super().__init__(
            model=model,
            reward_funcs=[recorded_reward],
            args=trl_arguments(config, output_dir),
            train_dataset=Dataset.from_dict(
                {"prompt": [""]}
            ),  # TRL asks for one; the batches come from elsewhere
            processing_class=tokenizer,
            optimizers=optimizer,
            callbacks=[_MovingAverage(self), *(callbacks or [])],
        )
        self.remove_callback(PrinterCallback)
        # TRL's loss gathers metrics that nobody reads, and a process without the channel would not be there.
        self.accelerator.gather = self.accelerator.reduce = lambda tensor, **_: tensor
        for weights in (side.teacher, side.reference):
            if weights is not None:
                weights.update({name: value.to(self.accelerator.device) for name, value in weights.items()})

    def get_train_dataloader(self) -> Any:
        """This process's micro-batches, one by one; the end of the batches ends the training."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes

        def micro_batches() -> Iterator[dict[str, MicroBatch]]:
            for batch in self._batches:
                due = self.learner_config.grad_norm_every
                measured = (
                    bool(due) and self.state.global_step % due == 0 and self._placement.measures_channels
                )
                self._stats = StepStats(measured and _channels(batch) > 1)
                mine = self._placement.parts(batch.micro_batches, rank, ranks)
                yield from ({"micro_batch": micro} for micro in mine)
            self.control.should_training_stop = True

        return Once(micro_batches())

    def step_metrics(self) -> dict[str, float]:
        """What the step that has just ended measured; what was not there is absent."""
        return self._stats.metrics()

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: the estimate needs a plain batch of token ids."""
        return 0

    def _send_telemetry(self) -> None:
        """Nothing about a run leaves the machine."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return generation_batch["micro_batch"].to(self.accelerator.device)

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self._metrics["train"].clear()  # TRL's own lists, which only its log would empty
        if not len(inputs.student):
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        hidden = self._hidden(inputs.student, self._placement.student())
        losses = dict(self._channel_losses(inputs, hidden))
        weighted = [self._weights[channel] * loss for channel, loss in losses.items()]
        self._stats.add_losses(losses)
        self._stats.add_gradients(dict(zip(losses, weighted, strict=True)), self._parameters())
        return torch.stack(weighted).sum() if weighted else hidden.sum() * 0.0

    def _channel_losses(self, batch: MicroBatch, hidden: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Losses, before their weights, of the channels that have something in this micro-batch.

        A pass with rows of which nothing is read is there for the sake of other processes, which have something.
        """
        if bool(batch.trained.any()):
            yield "grpo", self._grpo_loss(batch, hidden)
        if len(batch.student_index):
            yield "sdpo", self._hint_loss(batch, hidden)
        elif len(batch.teacher):
            self._teacher(batch)
        if batch.pairs:
            yield "dpo", self._preference_loss(batch, hidden)
        elif len(batch.reference):
            self._reference(batch)

    def _head(self) -> Head:
        return Head.of(self.student, self._placement.student())

    def _parameters(self) -> list[Tensor]:
        return [p for p in self.student.parameters() if p.requires_grad]

    def _hidden(self, rows: Packed, weights: Weights | None = None) -> Tensor:
        """(B, W, H) states behind the final norm, of the student or of what it is with other weights."""
        with self.accelerator.autocast():
            return backbone_states(
                self.student,
                weights,
                input_ids=rows.ids,
                attention_mask=rows.mask(),
                position_ids=rows.positions,
            )

    def _grpo_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """TRL's loss of this micro-batch, as its share of the loss of the whole step."""
        mask, targets = batch.trained[:, 1:], batch.student.ids[:, 1:]
        logps, entropies = self._head().logprobs(
            hidden[:, :-1][mask], targets[mask], temperature=self.temperature, entropy=True
        )
        assert entropies is not None, "asked for"
        self._stats.add_policy(batch, logps.detach(), entropies, (self.epsilon_low, self.epsilon_high))
        empty = logps.new_zeros(mask.shape)
        self._shared = (empty.masked_scatter(mask, logps), empty.masked_scatter(mask, entropies))
        old, advantages = self._behaviour(batch, self._shared[0].detach(), mask)
        loss: Tensor = super()._compute_loss(  # type: ignore[no-untyped-call]
            self.model,
            {
                "prompt_ids": batch.student.ids[:, :1],
                "prompt_mask": batch.trained[:, :1].long(),
                "completion_ids": batch.student.ids[:, 1:],
                "completion_mask": batch.trained[:, 1:].long(),
                "advantages": advantages,
                "old_per_token_logps": old,
                "num_items_in_batch": torch.tensor(self._num_items(batch), device=hidden.device),
            },
        )
        self._shared = None
        return loss * self._share(batch)

    def _behaviour(self, batch: MicroBatch, logps: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, W-1) log-probabilities of the old policy, and the advantages, per token where these are corrected."""
        recorded, kind = batch.logprobs[:, 1:], self.learner_config.correction
        if kind == "none":
            return recorded, batch.advantages
        weights = self._correction(logps, recorded, mask, batch.advantages)
        # The weights of these two hold the whole ratio to the policy that sampled; a second one would square it.
        old = logps if kind in ("tis", "icepop") else recorded
        return old, batch.advantages[:, None] * weights

    def _correction(self, logps: Tensor, recorded: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        """(B, T) weights of sampled tokens, from (B, T) each and advantages (B,)."""
        config = self.learner_config
        weights, dropped = correction_weights(
            config.correction,
            logps,
            recorded,
            mask=mask,
            cap=config.correction_cap,
            low=config.correction_low,
            high=config.correction_high,
            delta=config.correction_delta,
            advantages=advantages,
        )
        tokens = int(mask.sum())
        self._stats.add("correction_dropped", dropped * tokens, tokens)
        self._stats.add("correction_weight_mean", float(weights.sum()), tokens)
        return weights

    def _share(self, batch: MicroBatch) -> float:
        """Turns TRL's mean over a micro-batch, divided by their number, into a part of the step's mean."""
        if self.loss_type in ("dapo", "cispo", "vespo"):
            return 1.0  # divided by the tokens of the step already
        if self.loss_type == "bnpo":
            return int(batch.trained.sum()) * self._pieces / batch.totals.tokens
        return len(batch.student) * self._pieces / batch.totals.rows

    def _num_items(self, batch: MicroBatch) -> float:
        """TRL divides by the share of one process, for it averages gradients; here they are added up."""
        return float(batch.totals.tokens * self.accelerator.num_processes)

    @property
    def _pieces(self) -> int:
        pieces: int = self.current_gradient_accumulation_steps
        return pieces

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        """(B, W-1) log-probabilities and entropies from the shared hidden states; 0 off the policy loss."""
        assert self._shared, "called outside the policy loss"
        return *self._shared, None

    def _hint_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        config = self.learner_config
        hinted, teacher_head = self._teacher(batch)
        states = states_at(hidden, batch.student_index)
        divergence = fused_generalized_jsd(
            states,
            hinted,
            self._head(),
            teacher_head,
            beta=config.jsd_beta,
            temperature=config.distill_temperature,
            weights=None if config.correction == "none" else self._site_weights(batch, states.detach()),
        )
        self._stats.add_divergences(divergence)
        return divergence.sum() / batch.totals.hint_tokens

    def _site_weights(self, batch: MicroBatch, states: Tensor) -> Tensor:
        """(K,) weights of the compared tokens; 1 where the policy that sampled is unknown.

        Each site is a sequence of its own, whose failing call counts as one with a negative advantage.
        """
        with torch.no_grad():
            logps, _ = self._head().logprobs(states, batch.site_targets, temperature=self.temperature)
        known, against = batch.site_logprobs.isfinite(), -torch.ones(1, device=states.device)
        parts = [
            torch.split(values, list(batch.site_lengths)) for values in (logps, batch.site_logprobs, known)
        ]
        weights = [
            self._correction(ours[None], theirs[None], mask[None], against)[0]
            for ours, theirs, mask in zip(*parts, strict=True)
        ]
        return torch.cat(weights).where(known, 1.0)

    def _teacher(self, batch: MicroBatch) -> tuple[Tensor, Head]:
        """(K, H') states of the hinted contexts at the compared tokens, and the head that reads them."""

        def states(weights: Weights | None) -> tuple[Tensor, Head]:
            return self._read(batch.teacher, batch.teacher_index, weights)

        if self.learner_config.teacher != "trust_region":
            return states(self.side.teacher)
        return trust_region(*states(self.side.teacher), *states(None), self.learner_config.teacher_rate)

    def _reference(self, batch: MicroBatch) -> tuple[Tensor, Head]:
        """(N, H) states of the responses, and the head that reads them."""
        assert self.side.reference is not None, "pairs without a reference"
        return self._read(batch.reference, batch.pair_reference_index, self.side.reference)

    def _read(self, rows: Packed, index: Tensor, weights: Weights | None) -> tuple[Tensor, Head]:
        """States at an index (N, 2), and their head, of what the student is with other weights; no gradient."""
        with reading(self.student), self._placement.side(weights) as held:
            return states_at(self._hidden(rows, held), index), Head.of(self.student, held)

    def _preference_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        config = self.learner_config
        responses = (batch.pair_targets, batch.pair_response, batch.pairs)
        states = states_at(hidden, batch.pair_student_index)
        chosen, rejected = response_logps(self._head(), states, *responses)
        states, head = self._reference(batch)
        with torch.no_grad():
            reference = response_logps(head, states, *responses)
        result = dpo(
            chosen,
            rejected,
            *reference,
            beta=config.dpo_beta,
            chosen_nll=config.chosen_nll,
            chosen_lengths=batch.pair_response.bincount(minlength=2 * batch.pairs)[: batch.pairs],
        )
        self._stats.add("dpo_margin_mean", float(result.margins.sum()), len(result.margins))
        self._stats.add("dpo_accuracy", float(result.accuracies.sum()), len(result.margins))
        return result.losses.sum() / batch.totals.pairs

    def _clip_grad_norm(self, model: Any) -> Any:
        """The norm before clipping, of the gradient of all processes.

        Without a finite gradient or any channel the weights stay as they are.
        """
        if self.accelerator.num_processes > 1:
            self._placement.add_up()
            self._stats = StepStats.merged(gather_object([self._stats]))
        norm = whole(super()._clip_grad_norm(model))  # type: ignore[no-untyped-call]
        self._stats.end(float(norm))
        if self._stats.nothing_to_learn:
            model.zero_grad(set_to_none=True)  # zero gradients would still move the weights by momentum
        return norm


class _MovingAverage(TrainerCallback):
    """Pulls an EMA teacher towards the student after each optimizer step."""

    def __init__(self, trainer: ThreeChannelTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        teacher, config = self._trainer.side.teacher, self._trainer.learner_config
        if teacher is None or config.teacher != "ema":
            return
        with torch.no_grad():
            for name, mean in teacher.items():
                mean.lerp_(self._trainer.student.get_parameter(name), config.teacher_rate)


def _channels(batch: StepBatch) -> int:
    """How many channels the step can have."""
    return sum(bool(n) for n in (batch.totals.tokens, batch.totals.hint_tokens, batch.totals.pairs))
