"""That no checkpoint is saved of a training on damaged data, without waiting for a large corpus to be read."""

from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import gather_object

from config.errors import ConfigError, RunError

if TYPE_CHECKING:  # it needs pyarrow, and sources other than text do not
    from data.integrity import Verification

GRACE_SECONDS = 3  # for which a start waits: most corpora are settled before the first step


class CorpusCheck:
    """The first process of every machine verifies the files, and all processes together learn how that ended.

    Without a `verification`, as for data that are not read from files, its methods do nothing.
    """

    def __init__(self, verification: "Verification | None", accelerator: Accelerator, timeout_seconds: int):
        self.verification, self.reads = verification, accelerator.is_local_main_process
        self.round_seconds = timeout_seconds / 2  # others wait in a collective operation, which must not time out
        if verification and self.reads:
            verification.start()

    @property
    def failed(self) -> bool:
        """Whether this process knows of a damaged file; then all should come to `demand` soon."""
        return self.verification is not None and self.verification.problem is not None

    def begin(self) -> str | None:
        """Wait a little for the outcome, and say what is verified; all processes call it together.

        Raises:
            ConfigError: on all processes, with a damaged file.
        """
        return self.verification and self.verification.describe(done=self._exchange(GRACE_SECONDS))

    def demand(self, stopping: bool = False) -> None:
        """Return once every file, with the stamp that it has now, is known to be what data.prepare wrote.

        Raises:
            ConfigError: on all processes, with a damaged file.
            RunError: on all processes, where no file was read to its end for `timeout_seconds`, or, when the run is
                `stopping`, not all files within half of them.
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
        done = not self.reads or self.verification.wait(min(seconds, self.round_seconds))
        answers = gather_object([(done, self.verification.problem, self.verification.num_bytes_read)])
        if problems := [problem for _, problem, _ in answers if problem]:
            raise ConfigError(problems[0])
        self.num_bytes_read = sum(num_bytes for *_, num_bytes in answers)
        return all(done for done, *_ in answers)
