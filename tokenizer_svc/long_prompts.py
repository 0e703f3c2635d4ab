"""Long prompts, which threads work on, so that short ones need not wait for them."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tokenizer_svc.jobs import Job, Outcome


class LongPrompts:
    """The jobs in threads, or waiting for one."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="long-prompt")
        self._jobs: dict[Future[Outcome], Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def start(self, job: Job, make: Callable[[], Outcome]) -> None:
        """Let a thread make a job's outcome."""
        self._jobs[self._pool.submit(make)] = job

    def finished(self, patience_s: float) -> Iterator[tuple[Job, Outcome]]:
        """Take the jobs that are finished, each with its outcome; waits a moment for the first one."""
        if self._jobs:
            wait(self._jobs, patience_s, FIRST_COMPLETED)
        for future in [future for future in self._jobs if future.done()]:
            yield self._jobs.pop(future), future.result()

    def stop(self) -> None:
        """Leave what is not finished to others."""
        self._pool.shutdown(wait=False, cancel_futures=True)
