"""Waits of tests that end late, as on a machine that stalls after the event: what a test expects must still hold."""

import functools
import inspect
import re
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

_WAITS = re.compile(r"until|eventually|wait(_.+)?")
_MARK = "_is_late"


def delay_waits(modules: Iterable[ModuleType], seconds: float) -> int:
    """Let functions and methods that wait for an event, by their names, return so many seconds after it, wherever these
    modules have them; the number of those. Coroutines and generators are left as they are.
    """
    modules = list(modules)
    classes = {each for module in modules for each in vars(module).values() if inspect.isclass(each)}
    own = {module.__name__ for module in modules}
    places: list[ModuleType | type] = [*modules, *(each for each in classes if each.__module__ in own)]
    count = 0
    for place in places:
        for name, found in list(vars(place).items()):
            if _WAITS.fullmatch(name) and _is_plain(found) and found.__module__ in own:
                setattr(place, name, _late(found, seconds))
                count += 1
    return count


def _is_plain(found: object) -> bool:
    is_other = inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found) or hasattr(found, _MARK)
    return inspect.isfunction(found) and not is_other


def _late(wait: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(wait)
    def wait_and_be_late(*args: Any, **options: Any) -> Any:
        found = wait(*args, **options)
        time.sleep(seconds)
        return found

    setattr(wait_and_be_late, _MARK, True)
    return wait_and_be_late
