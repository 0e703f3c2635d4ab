"""The operations of the bus: each call is a value, with the type of its answer.

A connection carries out any number of calls in one write (`Connection.execute`), in order. Every call that changes
state is one atomic server-side function (docs/recovery.md says why) and may be sent again: it says what it
found instead of doing its work twice. Sessions, not connections, own things: a call that needs an active session and
finds it fenced, suspended or expired *and taken over* says so in its answer and changes nothing.

A session is alive while its `until` lies ahead of the server's clock. One whose `until` has passed may still renew, as
long as nobody took what it held. Times that decide anything are the server's; `*_ns` fields only measure.
"""

from servicekit.bus.calls.call import NOT_YET, Call, Settling
from servicekit.bus.calls.limits import Limit, Metered, OverLimit
from servicekit.bus.calls.ownership import Claim, Claimed, Commit, HandOver, Load, Loaded, Owned, Strike, Struck, Take
from servicekit.bus.calls.requests import (
    Attach,
    Attachment,
    Cancel,
    Fetch,
    Overdue,
    Recall,
    Recalled,
    Reject,
    RequestState,
    Retire,
    StoredRequest,
    Submit,
    SubmitOutcome,
    Tokenized,
)
from servicekit.bus.calls.server import ReadServerState, ServerState
from servicekit.bus.calls.sessions import (
    Greeting,
    Hello,
    Leave,
    ListSessions,
    ReadStatus,
    Renew,
    Renewed,
    Revalidate,
    SessionInfo,
    SessionKind,
)
from servicekit.bus.calls.shards import Checkpoint, Compact, LeaseShard, LogBacklogs, ReadCheckpoints, ReleaseShard
from servicekit.bus.calls.streams import (
    Acknowledge,
    Append,
    DropStream,
    Entry,
    LastId,
    Length,
    Read,
    ReadGroup,
    Reclaim,
)
from servicekit.bus.calls.traces import CountUntold, Delivered
from servicekit.bus.calls.waiting import Bounds, CountWaiting, Overload, Waiting
from servicekit.bus.calls.workers import (
    UNWANTED,
    ListWorkers,
    Pair,
    Pairing,
    RegisteredWorker,
    RegisterWorker,
    Survey,
    Surveyed,
    Unpair,
    Unwanted,
    WorkerEntry,
)

__all__ = [
    "NOT_YET",
    "UNWANTED",
    "Acknowledge",
    "Append",
    "Attach",
    "Attachment",
    "Bounds",
    "Call",
    "Cancel",
    "Checkpoint",
    "Claim",
    "Claimed",
    "Commit",
    "Compact",
    "CountUntold",
    "CountWaiting",
    "Delivered",
    "DropStream",
    "Entry",
    "Fetch",
    "Greeting",
    "HandOver",
    "Hello",
    "LastId",
    "LeaseShard",
    "Leave",
    "Length",
    "Limit",
    "ListSessions",
    "ListWorkers",
    "Load",
    "Loaded",
    "LogBacklogs",
    "Metered",
    "OverLimit",
    "Overdue",
    "Overload",
    "Owned",
    "Pair",
    "Pairing",
    "Read",
    "ReadCheckpoints",
    "ReadGroup",
    "ReadServerState",
    "ReadStatus",
    "Recall",
    "Recalled",
    "Reclaim",
    "RegisterWorker",
    "RegisteredWorker",
    "Reject",
    "ReleaseShard",
    "Renew",
    "Renewed",
    "RequestState",
    "Retire",
    "Revalidate",
    "ServerState",
    "SessionInfo",
    "SessionKind",
    "Settling",
    "StoredRequest",
    "Strike",
    "Struck",
    "Submit",
    "SubmitOutcome",
    "Survey",
    "Surveyed",
    "Take",
    "Tokenized",
    "Unpair",
    "Unwanted",
    "Waiting",
    "WorkerEntry",
]
