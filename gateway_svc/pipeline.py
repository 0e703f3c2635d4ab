"""The state of the whole pool, as `penstock status` shows it."""

from google.protobuf.message import DecodeError

from penstock.v1 import status_pb2
from servicekit.bus.calls import Length, ListSessions, ListWorkers, SessionInfo, SessionKind
from servicekit.bus.interface import AsyncConnection
from servicekit.bus.keys import Keys


async def read_pipeline(connection: AsyncConnection, keys: Keys, num_shards: int) -> status_pb2.PipelineStatus:
    """All sessions and the lengths of all streams.

    Raises:
        BusUnavailable: the server is gone.
    """
    sessions, workers = await connection.execute((ListSessions(), ListWorkers()))
    names = {
        "prompts": keys.prompts,
        "requests": keys.requests,
        "cancels": keys.cancels,
        "dead": keys.dead,
        **{f"tokens:{shard}": keys.tokens(shard) for shard in range(num_shards)},
        **{f"attach:{shard}": keys.attach(shard) for shard in range(num_shards)},
        **{f"steps:{each.worker}": keys.steps(each.worker) for each in workers},
        **{f"results:{each.worker}": keys.results(each.worker) for each in workers},
        **{f"text:{each.name}": keys.text(each.sid) for each in sessions if each.kind is SessionKind.GATEWAY},
    }
    lengths = await connection.execute([Length(stream) for stream in names.values()])
    return status_pb2.PipelineStatus(
        pool=keys.pool,
        sessions=[_session(each) for each in sessions],
        streams=[
            status_pb2.StreamStatus(stream=name, length=length) for name, length in zip(names, lengths, strict=True)
        ],
    )


def _session(info: SessionInfo) -> status_pb2.SessionStatus:
    try:
        status = status_pb2.ServiceStatus.FromString(info.status)
    except DecodeError:
        status = status_pb2.ServiceStatus()  # of a version that speaks otherwise: it is shown without figures
    return status_pb2.SessionStatus(
        kind=info.kind.value,
        name=info.name,
        address=info.address,
        alive=info.alive,
        owned_requests=info.num_owned,
        status=status,
    )
