"""That no checkpoint is saved of a training on damaged data, without waiting for a large corpus to be read."""

from typing import TYPE_CHECKING

from accelerate import Accelerator
from accelerate.utils import gather_object

from config import ConfigError

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

    def demand(self) -> None:
        """Return once every file, with the stamp that it has now, is known to be what data.prepare wrote.

        Raises:
            ConfigError: on all processes, with a damaged file.
        """
        if self.verification:
            if self.reads:
                self.verification.start()
            while not self._exchange(self.round_seconds):
                pass

    def _exchange(self, seconds: float) -> bool:
        done = not self.reads or self.verification.wait(min(seconds, self.round_seconds))
        answers = gather_object([(done, self.verification.problem)])
        if problems := [problem for _, problem in answers if problem]:
            raise ConfigError(problems[0])
        return all(done for done, _ in answers)
