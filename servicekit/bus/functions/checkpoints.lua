-- Compaction of the log: what is dropped of it is kept in the checkpoints of the requests that go on.

-- sid, shard, min_id, then request and checkpoint in turn.
local function compact(keys, args)
  local prefix, sid, shard, min_id = keys[1], args[1], args[2], args[3]
  if not leases_shard(prefix, sid, shard) then
    return 0
  end
  for i = 4, #args, 2 do
    local id = args[i]
    local request = redis.call('HMGET', request_key(prefix, id), 'state', 'shard')
    if request[1] == 'RUNNING' and request[2] == shard then
      redis.call('SET', checkpoint_key(prefix, id), args[i + 1])
      redis.call('ZADD', prefix .. '@checkpoints@' .. shard, '0', hex(id))
    end
  end
  redis.call('XTRIM', prefix .. '@tokens@' .. shard, 'MINID', min_id)
  return 1
end

local function read_checkpoints(keys, args)
  local prefix, sid, shard, after, count = keys[1], unpack(args)
  if not leases_shard(prefix, sid, shard) then
    return false
  end
  local first = after == '' and '-' or '(' .. hex(after)
  local found = {}
  local ids = redis.call('ZRANGE', prefix .. '@checkpoints@' .. shard, first, '+', 'BYLEX', 'LIMIT', '0', count)
  for _, id in ipairs(ids) do
    local rows = redis.call('GET', prefix .. '@checkpoint@' .. id)
    found[#found + 1] = { stored(prefix .. '@request@' .. id, unhex(id)), rows }
  end
  return found
end
