"""What a server of the chart does after a look at its Sentinels, which answer as they do at the worst moment."""

import os
import stat
import subprocess
import time
from pathlib import Path

from valkeys import CHART, LIMIT_S

SELF, OTHER = "127.0.0.1:1", "127.0.0.1:2"
SENTINELS = ("127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:5")
PROMOTED_AT, HEARD_AT, LAST = 6, 8, 14  # looks

# A client whose replies depend on how many looks there were: until PROMOTED_AT this server is a replica; then it is the
# primary, which only the Sentinel that promoted it knows; from HEARD_AT on all Sentinels know it.
CLIENT = f"""#!/bin/sh
look=$(cat "$LOOKS" 2>/dev/null || echo 0)
address="$2:$4"
shift 4
case "$address $*" in
  "{SELF} INFO replication")
    look=$((look + 1))
    echo "$look" >"$LOOKS"
    if [ "$look" -lt {PROMOTED_AT} ]; then
      printf 'role:slave\\nmaster_host:127.0.0.1\\nmaster_port:2\\nmaster_link_status:up\\nmaster_sync_in_progress:0\\n'
      printf 'master_replid:0\\n'
    else
      echo role:master
    fi
    ;;
  *GET-MASTER-ADDR-BY-NAME*)
    if [ "$look" -ge {HEARD_AT} ] || {{ [ "$look" -ge {PROMOTED_AT} ] && [ "$address" = {SENTINELS[0]} ]; }}; then
      printf '127.0.0.1\\n1\\n'
    else
      printf '127.0.0.1\\n2\\n'
    fi
    ;;
  *REPLICAOF*) echo "$look: $*" >>"$ORDERS" ;;
esac
"""


# Another: this server is a replica that copied by SYNC, until its link is dropped.
COPIED_BY_SYNC = f"""#!/bin/sh
address="$2:$4"
shift 4
case "$address $*" in
  "{SELF} INFO replication")
    look=$(cat "$LOOKS" 2>/dev/null || echo 0)
    echo "$((look + 1))" >"$LOOKS"
    printf 'role:slave\\nmaster_host:127.0.0.1\\nmaster_port:2\\nmaster_link_status:up\\nmaster_sync_in_progress:0\\n'
    if [ -e "$ORDERS" ]; then echo master_replid:1f3828; else echo master_replid:; fi
    ;;
  *GET-MASTER-ADDR-BY-NAME*) printf '127.0.0.1\\n2\\n' ;;
  *REPLICAOF* | *KILL*) echo "$*" >>"$ORDERS" ;;
esac
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def orders_of(tmp_path: Path, client: str) -> str:
    """The orders that a server which holds data gives itself in so many looks."""
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "holds-data").write_text("1600000000")
    looks, orders = tmp_path / "looks", tmp_path / "orders"
    environment = {
        "PATH": os.environ["PATH"],
        "LOOKS": str(looks),
        "ORDERS": str(orders),
        "VALKEY_SERVER": program(tmp_path / "server", "#!/bin/sh\nexec sleep 600\n"),
        "VALKEY_CLI": program(tmp_path / "client", client),
        "SELF": SELF,
        "PEERS": f"{SELF} {OTHER}",
        "SENTINELS": " ".join(SENTINELS),
        "PRIMARY_NAME": "pool",
        "POOL": "pool",
        "DATA_DIR": str(tmp_path),
        "RUN_DIR": str(tmp_path),
    }
    server = subprocess.Popen(["sh", str(CHART / "files" / "valkey.sh"), "start"], env=environment, process_group=0)
    try:
        limit = time.monotonic() + LIMIT_S
        while int((looks.read_text() if looks.exists() else "") or 0) < LAST:
            assert time.monotonic() < limit
            assert server.poll() is None
            time.sleep(0.1)
    finally:
        os.killpg(server.pid, 9)
        server.wait()
    return orders.read_text() if orders.exists() else ""


def test_a_replica_that_was_promoted_between_two_looks_stays_the_primary(tmp_path: Path) -> None:
    assert orders_of(tmp_path, CLIENT) == ""


def test_a_replica_that_copied_by_sync_links_again_once_since_it_would_acknowledge_nothing(tmp_path: Path) -> None:
    assert orders_of(tmp_path, COPIED_BY_SYNC) == "CLIENT KILL TYPE master\n"
