"""Settings of replicas."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ReplicasConfig(BaseModel):
    """Several learners that meet every ``sync_every`` steps. All of them need the same settings, but for ``index``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    count: int = Field(0, ge=0)
    """Replicas that are there from the start; 0: the learner is alone."""
    index: int = Field(0, ge=0)
    """Number of this replica, from 0; one of ``count`` or higher joins those that are there."""
    lighthouse: str | None = None
    """URL of torchft's lighthouse, where replicas find each other; they may die, come back and join."""
    rounds: str | None = None
    """URI of a folder through which they meet instead, without any network between them; dead ones are waited for."""
    host: str = "127.0.0.1"
    """Address of this machine for the other replicas. There is no authentication: loopback or a private network."""
    min_replicas: int = Field(1, ge=1)
    """Replicas without which no average counts."""
    sync_every: int = Field(100, ge=1)
    """Steps of each replica between two averages of the same fragment."""
    fragments: int = Field(1, ge=1)
    """Parts of the model that are averaged one after another, evenly over ``sync_every`` steps."""
    fragment_sync_delay: int = Field(0, ge=0)
    """Steps that an average may take on its way while training goes on."""
    fragment_update_alpha: float = Field(0.0, ge=0, le=1)
    """Share of the local parameters that is mixed into an average's result."""
    outer_lr: float = Field(0.7, gt=0)
    """Step size on what the replicas moved on average."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of these steps."""
    nesterov: bool = True
    """Whether that is Nesterov's momentum."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds for one exchange with the others once they are there."""
    round_timeout_s: float = Field(3600.0, gt=0)
    """Seconds that the others may need until they are there."""

    @property
    def period(self) -> int:
        """Steps between two averages of any fragment."""
        return self.sync_every // self.fragments

    @model_validator(mode="after")
    def _fits_together(self) -> ReplicasConfig:
        if self.count and (self.lighthouse is None) == (self.rounds is None):
            raise ValueError("replicas meet at a lighthouse or in a folder of rounds: give one of the two")
        if self.rounds is not None and self.index >= max(self.count, 1):
            raise ValueError(f"replica {self.index} of {self.count} cannot join in a folder of rounds")
        if self.sync_every % self.fragments:
            raise ValueError("sync_every must be a multiple of fragments")
        if self.fragment_sync_delay >= self.period:
            raise ValueError("fragment_sync_delay must be below sync_every / fragments")
        if self.nesterov and not self.outer_momentum:
            raise ValueError("nesterov needs outer_momentum")
        return self
