"""Verify the corpus while training starts; no checkpoint is saved before all its files are known to be undamaged."""

from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import gather_object

from config.errors import ConfigError, RunError

if TYPE_CHECKING:  # it needs pyarrow, and sources other than text do not
    from data.integrity import Verification

GRACE_SECONDS = 3  # how long a start waits; most corpora are verified by then


class CorpusCheck:
    """Verification by the first process of each machine, whose outcome all processes learn together.

    Without a `verification`, as for data that are not read from files, the methods do nothing.
    """

    def __init__(self, verification: "Verification | None", accelerator: Accelerator, timeout_seconds: int):
        self.verification, self.reads = verification, accelerator.is_local_main_process
        self.round_seconds = timeout_seconds / 2  # others wait in a collective operation, which must not time out
        if verification and self.reads:
            verification.start()

    @property
    def failed(self) -> bool:
        """Whether this process knows of a damaged file; then all processes should call `require_verified` soon."""
        return self.verification is not None and self.verification.problem is not None

    def begin(self) -> str | None:
        """Wait up to GRACE_SECONDS and describe what is verified so far; called by all processes together.

        Raises:
            ConfigError: on all processes, with a damaged file.
        """
        return self.verification and self.verification.describe(done=self._exchange(GRACE_SECONDS))

    def require_verified(self, stopping: bool = False) -> None:
        """Return once every file is known to be what data.prepare wrote; called by all processes together.

        Raises:
            ConfigError: on all processes, with a damaged file.
            RunError: on all processes, if nothing was read for `timeout_seconds`, or if not all files were within half
                of that when the run is `stopping`.
        """
        if self.verification:
            if self.reads:
                self.verification.start()
            before = -1
            while not self._exchange(self.round_seconds):
                if stopping or self.num_bytes_read == before:
                    read = f"{self.num_bytes_read:,} of {self.verification.num_bytes:,} bytes were read"
                    waited = self.round_seconds if stopping else 2 * self.round_seconds
                    raise RunError(
                        f"no checkpoint is saved before the corpus is verified, for which the run waited {waited:g} s: "
                        f"{read} so far; is its disk slow, or gone?"
                    )
                before = self.num_bytes_read

    def _exchange(self, seconds: float) -> bool:
        """Wait, then gather the outcomes; return whether all machines have verified their files."""
        assert self.verification is not None
        done = not self.reads or self.verification.wait(min(seconds, self.round_seconds))
        answers = gather_object([(done, self.verification.problem, self.verification.num_bytes_read)])
        if problems := [problem for _, problem, _ in answers if problem]:
            raise ConfigError(problems[0])
        self.num_bytes_read = sum(num_bytes for *_, num_bytes in answers)
        return all(done for done, *_ in answers)
