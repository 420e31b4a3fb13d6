"""The three-channel trainer: TRL's GRPO loss, hint distillation and DPO in one optimizer step.

A ``trl.GRPOTrainer`` that generates nothing: its batches are finished ``StepBatch``es. Replaced are where
batches come from, the forward pass (one backbone pass gives both the policy and the hint channel their hidden
states, and the vocabulary projection runs on the needed positions only) and the sum of the channels. The
policy loss itself is TRL's, with the recorded log-probabilities as the old policy. One process, one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from hintloop.learner.batch import MicroBatch, StepBatch
from hintloop.learner.config import LearnerConfig
from hintloop.learner.losses.divergence import hint_divergence
from hintloop.learner.losses.head import Head
from hintloop.learner.losses.preference import dpo
from hintloop.learner.models import SideModels, reading
from hintloop.learner.stats import StepStats


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

        ``ValueError`` when started as one of several processes.
        """
        self.learner_config = config
        self.student = model
        self.side = side
        self._weights = {"grpo": 1.0, "sdpo": config.alpha_sdpo, "dpo": config.beta_replay}
        self._batches = batches
        self._stats = StepStats()
        self._shared: tuple[MicroBatch, Tensor] | None = None
        super().__init__(
            model=model,
            reward_funcs=[_recorded_reward],
            args=_trl_arguments(config, output_dir),
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

        return _Once(micro_batches())

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
        if len(batch.ids):
            hidden = self._hidden(self.student, batch.ids, batch.attention)
            if bool(batch.trained.any()):
                yield "grpo", self._grpo_loss(batch, hidden)
            if len(batch.student_index):
                yield "sdpo", self._hint_loss(batch, hidden)
        if len(batch.pair_ids):
            yield "dpo", self._preference_loss(batch)

    def _parameters(self) -> list[Tensor]:
        return [p for p in self.student.parameters() if p.requires_grad]

    def _hidden(self, model: Any, ids: Tensor, attention: Tensor) -> Tensor:
        """(B, T, H) states behind the final norm."""
        with self.accelerator.autocast():
            output = model.base_model(input_ids=ids, attention_mask=attention, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states

    def _grpo_loss(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """TRL's loss of this micro-batch, as its share of the loss of the whole step."""
        self._shared = (batch, hidden)
        loss: Tensor = super()._compute_loss(  # type: ignore[no-untyped-call]
            self.model,
            {
                "prompt_ids": batch.ids[:, :1],
                "prompt_mask": batch.attention[:, :1],
                "completion_ids": batch.ids[:, 1:],
                "completion_mask": batch.attention[:, 1:],
                "tool_mask": batch.trained[:, 1:].long(),
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
        return len(batch.ids) * self._pieces / batch.totals.rows

    @property
    def _pieces(self) -> int:
        pieces: int = self.current_gradient_accumulation_steps
        return pieces

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        """(B, T-1) log-probabilities and entropies from the shared hidden states; 0 off the policy loss."""
        assert self._shared, "called outside the policy loss"
        batch, hidden = self._shared
        mask, targets = batch.trained[:, 1:], batch.ids[:, 1:]
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
            hinted = self._hidden(teacher, batch.teacher_ids, batch.teacher_attention)
        divergence = hint_divergence(
            hidden[batch.student_index[:, 0], batch.student_index[:, 1]],
            hinted[batch.teacher_index[:, 0], batch.teacher_index[:, 1]],
            Head.of(self.student),
            Head.of(teacher),
            beta=config.jsd_beta,
            temperature=config.distill_temperature,
        )
        self._stats.add("divergence_mean", float(divergence.detach().sum()), len(divergence))
        return divergence.sum() / batch.totals.hint_tokens

    def _preference_loss(self, batch: MicroBatch) -> Tensor:
        chosen, rejected = self._response_logps(self.student, batch)
        assert self.side.reference is not None, "pairs without a reference model"
        with reading(self.side.reference):
            reference = self._response_logps(self.side.reference, batch)
        result = dpo(
            chosen,
            rejected,
            *reference,
            beta=self.learner_config.dpo_beta,
            chosen_nll=self.learner_config.chosen_nll,
            chosen_lengths=batch.pair_response[: len(chosen)].sum(1),
        )
        self._stats.add("dpo_margin_mean", float(result.margins.sum()), len(result.margins))
        self._stats.add("dpo_accuracy", float(result.accuracies.sum()), len(result.margins))
        return result.losses.sum() / batch.totals.pairs

    def _response_logps(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Summed log-probabilities (P,) of the chosen and of the rejected responses."""
        hidden = self._hidden(model, batch.pair_ids, batch.pair_attention)
        mask = batch.pair_response[:, 1:]
        logps, _ = Head.of(model).logprobs(hidden[:, :-1][mask], batch.pair_ids[:, 1:][mask])
        sums = logps.new_zeros(mask.shape).masked_scatter(mask, logps).sum(1)
        pairs = len(sums) // 2
        return sums[:pairs], sums[pairs:]

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


class _Once:
    """An iterator in the shape of a data loader of unknown length."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


def _recorded_reward(*_: Any, **__: Any) -> list[float | None]:
    """TRL asks for a reward function; the rewards are in the journal."""
    raise AssertionError("the learner generates nothing, so it grades nothing")


def _channels(batch: StepBatch) -> int:
    """How many channels the step can have."""
    return sum(bool(n) for n in (batch.totals.tokens, batch.totals.hint_tokens, batch.totals.pairs))


def _trl_arguments(config: LearnerConfig, output_dir: Path) -> GRPOConfig:
    """No generation, no logging, no saving, no evaluation: these belong to others here."""
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=max(config.steps, 1),
        per_device_train_batch_size=2,  # with the next line the least that TRL accepts; the batches are ready
        num_generations=2,
        gradient_accumulation_steps=config.micro_batches,
        max_grad_norm=config.max_grad_norm,
        loss_type=config.loss_type,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        temperature=config.sampling_temperature,
        beta=0.0,
        router_aux_loss_coef=0.0,
        disable_dropout=False,
        activation_checkpointing=config.activation_checkpointing,
        bf16=torch.cuda.is_available(),
        seed=config.seed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
