"""Verify the files of the corpus while training starts; no checkpoint is saved before all are known to be undamaged."""

from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import gather_object

from config.errors import ConfigError, RunError

if TYPE_CHECKING:  # it needs pyarrow, and sources other than text do not
    from data.integrity import Verification

GRACE_SECONDS = 3  # how long a start waits, which is enough for most corpora


class CorpusCheck:
    """Verification by the first process of each machine, with the outcome exchanged between all processes.

    Without a `verification`, as for generated data, the methods do nothing.
    """

    def __init__(self, verification: "Verification | None", accelerator: Accelerator, timeout_seconds: int):
        self.verification, self.verifies = verification, accelerator.is_local_main_process
        self.round_seconds = timeout_seconds / 2  # the others wait in a collective operation, which must not time out
        if verification and self.verifies:
            verification.start()

    @property
    def failed(self) -> bool:
        """Whether this process has found a damaged file; `require_verified` raises the error on all processes."""
        return self.verification is not None and self.verification.problem is not None

    def begin(self) -> str | None:
        """Wait up to GRACE_SECONDS and describe the progress; called by all processes together.

        On all processes, raise ConfigError if a file is damaged.
        """
        return self.verification and self.verification.describe(done=self._exchange(GRACE_SECONDS))

    def require_verified(self, stopping: bool = False) -> None:
        """Return once every file is known to be what data.prepare wrote; called by all processes together.

        On all processes, raise ConfigError if a file is damaged, and RunError if nothing was read for the timeout, or,
        when the run is `stopping`, if not everything was read within half of it.
        """
        if self.verification:
            if self.verifies:
                self.verification.start()
            before = -1
            while not self._exchange(self.round_seconds):
                if stopping or self.num_bytes_read == before:
                    read = f"{self.num_bytes_read:,} of {self.verification.num_bytes:,} bytes were read"
                    waited = self.round_seconds if stopping else 2 * self.round_seconds
                    raise RunError(
                        f"no checkpoint is saved before the corpus is verified, and after {waited:g} s only {read}; is "
                        "its disk slow, or gone?"
                    )
                before = self.num_bytes_read

    def _exchange(self, seconds: float) -> bool:
        """Wait, exchange the outcomes, and return whether all machines have verified their files."""
        assert self.verification is not None
        done = not self.verifies or self.verification.wait(min(seconds, self.round_seconds))
        answers = gather_object([(done, self.verification.problem, self.verification.num_bytes_read)])
        if problems := [problem for _, problem, _ in answers if problem]:
            raise ConfigError(problems[0])
        self.num_bytes_read = sum(num_bytes for *_, num_bytes in answers)
        return all(done for done, *_ in answers)
