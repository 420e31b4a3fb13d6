"""Settings of the learner."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hintloop.replay.filter import Filter


class LearnerConfig(BaseModel):
    """How to train. One optimizer step takes ``groups_per_step`` groups and makes one version."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: int = Field(200, ge=0)
    """Optimizer steps in all, over all restarts."""
    epochs: int = Field(1, ge=1)
    """Passes over a recorded journal; a live journal has one."""
    max_minutes: float | None = Field(None, gt=0)
    """Wall time in minutes, over all restarts, after which training ends; None for no limit."""
    groups_per_step: int = Field(8, ge=1)
    """Groups of episodes in one optimizer step."""
    micro_batches: int = Field(4, ge=1)
    """Forward and backward passes per step. Bounds memory; changes no gradient."""
    sources: tuple[str, ...] = ()
    """Train on episodes of these sources only, such as ``rollout`` or ``claude_code``; empty for all."""
    tasks: tuple[str, ...] = ()
    """Train on tasks like one of these patterns only, such as ``bugfix/*``; empty for all."""
    models: tuple[str, ...] = ()
    """Train on episodes of models like one of these patterns only; empty for all."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW step size after the warm-up."""
    warmup_steps: int = Field(5, ge=0)
    """Steps of linear warm-up."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm that the gradient of a step is clipped to."""
    loss_type: Literal["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """Policy loss of the reward channel, as TRL names them."""
    epsilon: float = Field(0.2, gt=0)
    """Lower clip range of the probability ratio."""
    epsilon_high: float = Field(0.28, gt=0)
    """Upper clip range; for ``cispo`` the cap of the ratio itself, where 5 is usual."""
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Weights of sampled tokens, in reward and hint channel, for the policy that sampled them: ``tis`` (ratio up to a
    cap), ``icepop`` (ratio within bounds, else 0), ``sequence_mask`` (0 for rows that got too unlikely). ``none``
    leaves it to the clipped ratio of the policy loss, which the first two replace."""
    correction_cap: float = Field(2.0, gt=0)
    """Largest weight of ``tis``."""
    correction_low: float = Field(0.5, ge=0)
    """Smallest ratio that ``icepop`` keeps."""
    correction_high: float = Field(5.0, gt=0)
    """Largest ratio that ``icepop`` keeps."""
    correction_delta: float = Field(0.1)
    """Mean fall of the log-probability, in nats per token, beyond which ``sequence_mask`` drops a row that counts
    against itself."""
    sampling_temperature: float = Field(1.0, gt=0)
    """Temperature that the recorded log-probabilities were drawn at."""
    alpha_sdpo: float = Field(0.1, ge=0)
    """Weight of the hint channel; 0 switches it off, teacher included."""
    jsd_beta: float = Field(0.5, ge=0, le=1)
    """Divergence of the hint channel: 0 is KL(teacher || student), 1 is KL(student || teacher), else JSD."""
    distill_temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions in the hint channel."""
    teacher: Literal["ema", "frozen", "trust_region", "live"] = "ema"
    """The hinted teacher: a moving average of the student, the start model, that one with a share of the student in
    its logits, or the student itself."""
    teacher_rate: float = Field(0.05, ge=0, le=1)
    """Share of the student that enters the teacher: ``ema``, the average at each optimizer step; ``trust_region``,
    the logits."""
    average_last: bool = False
    """Publish the moving average, which the ``ema`` teacher is, as the last version, in place of the last weights."""
    beta_replay: float = Field(0.1, ge=0)
    """Weight of the preference channel; 0 switches it off, reference model included."""
    dpo_beta: float = Field(0.1, gt=0)
    """Inverse temperature of the preference loss."""
    chosen_nll: float = Field(0.0, ge=0)
    """Weight, within the preference channel, of the mean negative log-likelihood of the chosen response (RPO)."""
    lora_rank: int = Field(0, ge=0)
    """Rank of the adapters (LoRA, needs the package ``peft``) that are trained in place of the weights; 0 trains the
    weights. What is published is a whole model all the same, and the adapters beside it."""
    lora_alpha: int = Field(32, ge=1)
    """Scale of the adapters; what they add is multiplied by this over their rank."""
    max_sites_per_step: int = Field(64, ge=1)
    """Hint sites used per step; more are sampled down and counted."""
    max_pairs_per_step: int = Field(32, ge=1)
    """Preference pairs used per step; more are sampled down and counted."""
    max_staleness: int | None = Field(4, ge=0)
    """Versions that a sampled token may lag behind the weights being trained; None for no limit. A recorded
    journal, which nobody appends to, has no limit."""
    max_row_tokens: int | None = Field(None, ge=2)
    """Tokens of the longest context, its target turn included; None for no limit. Later tokens of an episode
    leave the policy loss; a hinted context or a side of a pair loses the beginning of its prompt, or is left out
    where hint and turn alone are longer. Everything left out is counted."""
    site: Literal["failing", "recovery"] = "failing"
    """Turn that a hint is compared at: the one whose call failed, or the assistant's next one, which repairs it;
    the hint stands directly before that turn."""
    publish_every: int = Field(1, ge=1)
    """Steps between two checkpoints, each of which is published."""
    keep_versions: int = Field(4, ge=1)
    """Published versions that are kept."""
    grad_norm_every: int = Field(20, ge=0)
    """Steps between two measurements of each channel's own gradient norm, which cost a backward pass each;
    0 for never."""
    activation_checkpointing: bool = False
    """Compute activations twice rather than keep them: less memory, more time."""
    sharded: bool = False
    """Give each of several processes a part of every parameter, of the optimizer and of teacher and reference (FSDP2),
    in place of all of them. The channels' own gradient norms are not measured then."""
    idle_timeout_s: float = Field(600.0, gt=0)
    """Seconds without a new group after which a learner on a live journal gives up."""
    storage_timeout_s: float = Field(300.0, gt=0)
    """Seconds that the storage of journal or weights may fail before the learner gives up; it is tried again
    meanwhile."""
    threads: int = Field(1, ge=1)
    """CPU threads of torch."""
    seed: int = 0
    """Seed of the sampling of sites and pairs, and of dropout where a model has any."""

    @property
    def only(self) -> Filter:
        """Which episodes of the journal to train on."""
        return Filter(sources=self.sources, tasks=self.tasks, models=self.models)

    @model_validator(mode="after")
    def _fits_together(self) -> LearnerConfig:
        if self.average_last and (self.teacher != "ema" or not self.alpha_sdpo):
            raise ValueError("average_last needs the moving average: teacher = 'ema' and alpha_sdpo > 0")
        if self.correction != "none" and self.loss_type == "vespo":
            raise ValueError("loss_type 'vespo' corrects for the sampling policy itself: correction = 'none'")
        if self.correction_low > self.correction_high:
            raise ValueError("correction_low must not be above correction_high")
        return self
