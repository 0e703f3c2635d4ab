-- Workers and the shards of the log.

local function last_id(stream)
  if redis.call('EXISTS', stream) == 0 then
    return '0-0'
  end
  local info = redis.call('XINFO', 'STREAM', stream)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      return info[i + 1]
    end
  end
end

local function register_worker(keys, args)
  local prefix, sid, worker, info = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return ''
  end
  local key = prefix .. 'worker:' .. worker
  if redis.call('HGET', key, 'incarnation') ~= sid then
    redis.call('HDEL', key, 'owner')
  end
  redis.call('SADD', prefix .. 'workers', worker)
  redis.call('HSET', key, 'incarnation', sid, 'info', info)
  raise(prefix, 'w' .. worker)
  return last_id(prefix .. 'steps:' .. worker)
end

local function list_workers(keys)
  local prefix, now, listed = keys[1], now_ms(), {}
  for _, name in ipairs(redis.call('SMEMBERS', prefix .. 'workers')) do
    local worker = redis.call('HMGET', prefix .. 'worker:' .. name, 'incarnation', 'info', 'owner')
    local alive = lives(prefix, worker[1], now) and 1 or 0
    listed[#listed + 1] = { name, worker[1], alive, worker[2], lives(prefix, worker[3], now) and worker[3] }
  end
  return listed
end

local function pair(keys, args)
  local prefix, sid, name = keys[1], unpack(args)
  local key = prefix .. 'worker:' .. name
  local worker = redis.call('HMGET', key, 'incarnation', 'info', 'owner')
  local owner = worker[3]
  if not is_active(prefix, sid) or not lives(prefix, worker[1], now_ms()) then
    return false
  end
  if owner and owner ~= sid and redis.call('EXISTS', prefix .. 'sess:' .. owner) == 1 then
    return false
  end
  redis.call('HSET', key, 'owner', sid)
  touch(prefix, 'w' .. name)
  return { worker[1], worker[2], last_id(prefix .. 'results:' .. name) }
end

local function unpair(keys, args)
  local prefix, sid, name = keys[1], unpack(args)
  local key = prefix .. 'worker:' .. name
  if redis.call('HGET', key, 'owner') == sid then
    redis.call('HDEL', key, 'owner')
    touch(prefix, 'w' .. name)
  end
  return 1
end

local function lease_shard(keys, args)
  local prefix, sid, shard, held, num_read = keys[1], unpack(args)
  local holder = redis.call('HGET', prefix .. 'shards', shard)
  if not is_active(prefix, sid) or (holder ~= sid and (held == '1' or lives(prefix, holder, now_ms()))) then
    return 0
  end
  redis.call('HSET', prefix .. 'shards', shard, sid)
  redis.call('HSET', prefix .. 'read', shard, num_read)
  return 1
end

local function log_backlogs(keys, args)
  local prefix, backlogs = keys[1], {}
  for i, shard in ipairs(args) do
    local num_read = redis.call('HGET', prefix .. 'read', shard) or 0
    backlogs[i] = math.max(0, redis.call('XLEN', prefix .. 'tokens:' .. shard) - num_read)
  end
  return backlogs
end

local function release_shard(keys, args)
  local prefix, sid, shard = keys[1], unpack(args)
  if redis.call('HGET', prefix .. 'shards', shard) == sid then
    redis.call('HDEL', prefix .. 'shards', shard)
    redis.call('HDEL', prefix .. 'read', shard)
  end
  return 1
end
