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
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from hintloop.learner.arguments import Once, recorded_reward, trl_arguments
from hintloop.learner.batch import StepBatch
from hintloop.learner.config import LearnerConfig
from hintloop.learner.losses.divergence import fused_generalized_jsd
from hintloop.learner.losses.head import Head
from hintloop.learner.losses.preference import dpo, response_logps
from hintloop.learner.models import SideModels, reading
from hintloop.learner.packing import Packed, require_masks
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
        side: SideModels,
        optimizer: tuple[torch.optim.Optimizer, Any],
        output_dir: Path,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        """``batches`` is iterated once; training ends with it or after ``config.steps``.

        ``ValueError`` when started as one of several processes, or for a model that cannot take masks.
        """
        for reader in (model, side.teacher, side.reference):
            if reader is not None:
                require_masks(reader)
        self.learner_config = config
        self.student = model
        self.side = side
        self._weights = {"grpo": 1.0, "sdpo": config.alpha_sdpo, "dpo": config.beta_replay}
        self._batches = batches
        self._stats = StepStats()
        self._shared: tuple[MicroBatch, Tensor] | None = None
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
        if self.accelerator.num_processes != 1:
            raise ValueError("the learner is one process; start it without a distributed launcher")
        self.remove_callback(PrinterCallback)
        for reader in (side.teacher, side.reference):
            if reader is not None:
                reader.to(self.accelerator.device)

    def get_train_dataloader(self) -> Any:
        """Micro-batch by micro-batch; the end of the batches ends the training."""

        def micro_batches() -> Iterator[dict[str, MicroBatch]]:
            for batch in self._batches:
                due = self.learner_config.grad_norm_every
                measured = bool(due) and self.state.global_step % due == 0
                self._stats = StepStats(measured and _channels(batch) > 1)
                yield from ({"micro_batch": micro} for micro in batch.micro_batches)
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
        losses = dict(self._channel_losses(inputs))
        weighted = [self._weights[channel] * loss for channel, loss in losses.items()]
        parameters = self._parameters()
        self._stats.add_losses(losses)
        self._stats.add_gradients(dict(zip(losses, weighted, strict=True)), parameters)
        return torch.stack(weighted).sum() if weighted else parameters[0].sum() * 0.0

    def _channel_losses(self, batch: MicroBatch) -> Iterator[tuple[str, Tensor]]:
        """Losses, before their weights, of the channels that have something in this micro-batch."""
        if not len(batch.student):
            return
        hidden = self._hidden(self.student, batch.student)
        if bool(batch.trained.any()):
            yield "grpo", self._grpo_loss(batch, hidden)
        if len(batch.student_index):
            yield "sdpo", self._hint_loss(batch, hidden)
        if batch.pairs:
            yield "dpo", self._preference_loss(batch, hidden)

    def _parameters(self) -> list[Tensor]:
        return [p for p in self.student.parameters() if p.requires_grad]

    def _hidden(self, model: Any, rows: Packed) -> Tensor:
        """(B, W, H) states behind the final norm."""
        with self.accelerator.autocast():
            output = model.base_model(
                input_ids=rows.ids,
                attention_mask=rows.mask(),
                position_ids=rows.positions,
                use_cache=False,
            )
        states: Tensor = output.last_hidden_state
        return states

    def _grpo_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """TRL's loss of this micro-batch, as its share of the loss of the whole step."""
        self._shared = (batch, hidden)
        loss: Tensor = super()._compute_loss(  # type: ignore[no-untyped-call]
            self.model,
            {
                "prompt_ids": batch.student.ids[:, :1],
                "prompt_mask": batch.trained[:, :1].long(),
                "completion_ids": batch.student.ids[:, 1:],
                "completion_mask": batch.trained[:, 1:].long(),
                "advantages": batch.advantages,
                "old_per_token_logps": batch.logprobs[:, 1:],
                "num_items_in_batch": torch.tensor(float(batch.totals.tokens), device=hidden.device),
            },
        )
        self._shared = None
        return loss * self._share(batch)

    def _share(self, batch: MicroBatch) -> float:
        """Turns TRL's mean over a micro-batch, divided by their number, into a part of the step's mean."""
        if self.loss_type in ("dapo", "cispo", "vespo"):
            return 1.0  # divided by the tokens of the step already
        if self.loss_type == "bnpo":
            return int(batch.trained.sum()) * self._pieces / batch.totals.tokens
        return len(batch.student) * self._pieces / batch.totals.rows

    @property
    def _pieces(self) -> int:
        pieces: int = self.current_gradient_accumulation_steps
        return pieces

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        """(B, W-1) log-probabilities and entropies from the shared hidden states; 0 off the policy loss."""
        assert self._shared, "called outside the policy loss"
        batch, hidden = self._shared
        mask, targets = batch.trained[:, 1:], batch.student.ids[:, 1:]
        logps, entropies = Head.of(self.student).logprobs(
            hidden[:, :-1][mask], targets[mask], temperature=self.temperature, entropy=True
        )
        self._stats.add_policy(batch, logps.detach(), entropies, (self.epsilon_low, self.epsilon_high))
        assert entropies is not None, "asked for"
        empty = logps.new_zeros(mask.shape)
        return empty.masked_scatter(mask, logps), empty.masked_scatter(mask, entropies), None

    def _hint_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        config = self.learner_config
        teacher = self.side.teacher or self.student
        with reading(teacher):
            hinted = self._hidden(teacher, batch.teacher)
        divergence = fused_generalized_jsd(
            states_at(hidden, batch.student_index),
            states_at(hinted, batch.teacher_index),
            Head.of(self.student),
            Head.of(teacher),
            beta=config.jsd_beta,
            temperature=config.distill_temperature,
        )
        self._stats.add("divergence_mean", float(divergence.detach().sum()), len(divergence))
        return divergence.sum() / batch.totals.hint_tokens

    def _preference_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        config, reader = self.learner_config, self.side.reference
        assert reader is not None, "pairs without a reference model"
        responses = (batch.pair_targets, batch.pair_response, batch.pairs)
        states = states_at(hidden, batch.pair_student_index)
        chosen, rejected = response_logps(Head.of(self.student), states, *responses)
        with reading(reader):
            states = states_at(self._hidden(reader, batch.reference), batch.pair_reference_index)
            reference = response_logps(Head.of(reader), states, *responses)
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
        """The norm before clipping. Without a finite gradient or any channel the weights stay as they are."""
        norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        self._stats.end(float(norm))
        if self._stats.nothing_to_learn:
            model.zero_grad(set_to_none=True)  # zero gradients would still move the weights by momentum
        return norm


class _MovingAverage(TrainerCallback):
    """Pulls an EMA teacher towards the student after each optimizer step."""

    def __init__(self, trainer: ThreeChannelTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        teacher, config = trainer.side.teacher, trainer.learner_config
        if teacher is None or config.teacher != "ema":
            return
        with torch.no_grad():
            for mean, parameter in zip(teacher.parameters(), trainer.student.parameters(), strict=True):
                mean.lerp_(parameter, config.ema_rate)


def _channels(batch: StepBatch) -> int:
    """How many channels the step can have."""
    return sum(bool(n) for n in (batch.totals.tokens, batch.totals.hint_tokens, batch.totals.pairs))
