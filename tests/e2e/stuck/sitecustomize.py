"""On the path of a process from outside: at SIGUSR1 its service's loop hangs, and everything else in it goes on.

Python imports a module of this name by itself. The loop is a thread that is called like the service and hangs at its
next turn to the bus; a gateway's is that of the main thread, where signals are handled.
"""

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

LOOPS = {"tokenizer", "scheduler", "worker", "detokenizer"}


def hang() -> NoReturn:
    while True:
        time.sleep(60)


def stick(_number: int, _frame: FrameType | None) -> None:
    if not LOOPS & {thread.name for thread in threading.enumerate()}:
        hang()
    connection: Any = sys.modules["servicekit.bus.redis_connection"].RedisConnection
    execute = connection.execute

    def stuck(*arguments: Any) -> Any:
        if threading.current_thread().name in LOOPS:
            hang()
        return execute(*arguments)

    connection.execute = stuck


signal.signal(signal.SIGUSR1, stick)
