"""Verify the files of the corpus in the background; no checkpoint is saved before all are known to be undamaged."""

from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import gather_object

from config.errors import ConfigError, RunError

if TYPE_CHECKING:  # it needs pyarrow, and sources other than text do not
    from data.integrity import Verification

GRACE_SECONDS = 3  # how long the first step waits for the verification; enough for most corpora


class CorpusCheck:
    """Verification by the first process of each machine, with the outcome exchanged between all processes.

    Without a `verification`, as for generated data, the methods do nothing.
    """

    def __init__(self, verification: "Verification | None", accelerator: Accelerator, timeout_seconds: int):
        self.verification, self.is_verifier = verification, accelerator.is_local_main_process
        self.max_wait_seconds = timeout_seconds / 2  # the other processes wait in a collective, which must not time out
        if verification and self.is_verifier:
            verification.start()

    @property
    def failed(self) -> bool:
        """Whether this process has found a damaged file; `require_verified` raises the error on all processes."""
        return self.verification is not None and self.verification.problem is not None

    def wait_briefly(self) -> str | None:
        """Wait up to GRACE_SECONDS and return the status for the summary; called by all processes together.

        On all processes, raise ConfigError if a file is damaged. Return None without a verification.
        """
        if self.verification is None:
            return None
        return self.verification.describe(done=self._wait_and_gather(GRACE_SECONDS))

    def require_verified(self, stopping: bool = False) -> None:
        """Return once every file is known to be what data.prepare wrote; called by all processes together.

        On all processes, raise ConfigError if a file is damaged, and RunError if a machine verifies no file for half of
        `timeout_seconds` (at first, for all of it) or, when the run is `stopping`, if the verification takes longer
        than half.
        """
        if self.verification is None:
            return
        if self.is_verifier:
            self.verification.start()  # again, to read files that have changed since
        waited, previously_read = 0.0, -1
        while not self._wait_and_gather(self.max_wait_seconds):
            waited += self.max_wait_seconds
            if stopping or self.num_bytes_read == previously_read:
                read = f"{self.num_bytes_read:,} of {self.verification.num_bytes:,} bytes were read"
                raise RunError(
                    f"no checkpoint is saved before the corpus is verified, and after {waited:g} s only {read}; is its "
                    "disk slow, or gone?"
                )
            previously_read = self.num_bytes_read

    def _wait_and_gather(self, seconds: float) -> bool:
        """Wait for this process's verification, and return whether those of all machines are done."""
        assert self.verification is not None
        done = not self.is_verifier or self.verification.wait(min(seconds, self.max_wait_seconds))
        outcomes = gather_object([(done, self.verification.problem, self.verification.num_bytes_read)])
        if problems := [problem for _, problem, _ in outcomes if problem]:
            raise ConfigError(problems[0])
        unfinished = [num_bytes for done, _, num_bytes in outcomes if not done]
        self.num_bytes_read = min(unfinished, default=0)  # on the slowest machine
        return not unfinished
