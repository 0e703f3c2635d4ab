"""Two revisions of Penstock on one machine: processes are started with the code that a link leads to."""

import re
import subprocess
from pathlib import Path

from servicekit.shape import PROTOCOL

_PROTOCOL_FILE = "servicekit/shape.py"
_PROTOCOL_LINE = re.compile(r'^PROTOCOL = "(\w+)"', re.MULTILINE)


class Revisions:
    """An earlier revision and this checkout. What is started again gets the one that was chosen last."""

    def __init__(self, root: Path, revision: str, folder: Path) -> None:
        """Unpacks the earlier revision and chooses it.

        Args:
            root: this checkout.
            revision: as git names it.
            folder: takes its files and the link; is there, and empty.

        Raises:
            SystemExit: git has no such revision, or its processes cannot share a pool with this one's.
        """
        self._present, self._earlier = root, folder / "earlier"
        self.path = folder / "code"  # for PYTHONPATH
        _git(root, "rev-parse", "--verify", f"{revision}^{{commit}}")
        said = _PROTOCOL_LINE.search(
            _git(root, "grep", "-h", "PROTOCOL", revision, "--", _PROTOCOL_FILE, may_fail=True)
        )
        if said is None or said[1] != PROTOCOL:
            theirs = f"protocol {said[1]}" if said else "no protocol"
            raise SystemExit(
                f"{revision} speaks {theirs}, this checkout protocol {PROTOCOL}: they cannot share a pool; "
                "start the new one in a pool of its own"
            )
        self._earlier.mkdir()
        archive = subprocess.run(["git", "archive", revision], cwd=root, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", self._earlier], input=archive.stdout, check=True)
        self.path.symlink_to(self._earlier)

    def choose_present(self) -> None:
        """Start processes of this checkout from now on."""
        self._turn(self._present)

    def choose_earlier(self) -> None:
        """Start processes of the earlier revision from now on."""
        self._turn(self._earlier)

    def _turn(self, target: Path) -> None:
        made = self.path.with_name("made")
        made.symlink_to(target)
        made.replace(self.path)  # at once: processes start at any moment


def _git(root: Path, *words: str, may_fail: bool = False) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise SystemExit(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout
