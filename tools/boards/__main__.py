"""Makes the boards of deploy/grafana; with --check says whether the committed files are up to date."""

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tools.boards import capacity, overview, pipeline, reliability, scheduler, worker
from tools.boards.panels import model

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm" / "penstock" / "files" / "boards"  # deploy/grafana leads there
BOARDS = tuple(each.BOARD for each in (overview, pipeline, scheduler, worker, reliability, capacity))


def files() -> dict[Path, str]:
    """The text of each board's file."""
    return {
        FOLDER / f"{board.name}.json": json.dumps(model(board), cls=JSONEncoder, indent=1, ensure_ascii=False) + "\n"
        for board in BOARDS
    }


def main() -> int:
    """Entry point; the exit status is 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    made = files()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    others = [path for path in FOLDER.glob("*.json") if path not in made]
    if check:
        for path in stale + others:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
        return int(bool(stale or others))
    for path in stale:
        path.write_text(made[path], "utf-8")
    for path in others:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
