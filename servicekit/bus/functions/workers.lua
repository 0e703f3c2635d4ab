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
  local prefix, sid, worker, info, model = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return ''
  end
  local key = prefix .. '@worker@' .. worker
  -- Also of the same incarnation: it will not read the plans that its scheduler has sent it until now.
  redis.call('HDEL', key, 'owner')
  redis.call('SADD', prefix .. '@workers@', worker)
  redis.call('HSET', key, 'incarnation', sid, 'info', info, 'model', model)
  raise(prefix, 'w' .. worker)
  return last_id(prefix .. '@steps@' .. worker)
end

local function list_workers(keys)
  local prefix, now, listed = keys[1], now_ms(), {}
  for _, name in ipairs(redis.call('SMEMBERS', prefix .. '@workers@')) do
    local worker = redis.call('HMGET', prefix .. '@worker@' .. name, 'incarnation', 'info', 'owner')
    local alive = lives(prefix, worker[1], now) and 1 or 0
    listed[#listed + 1] = { name, worker[1], alive, worker[2], lives(prefix, worker[3], now) and worker[3] }
  end
  return listed
end

-- The models that are in use: paired workers have them, or schedulers hold requests that began on them.
local function models_in_use(prefix, now)
  local found = {}
  for _, name in ipairs(redis.call('SMEMBERS', prefix .. '@workers@')) do
    local worker = redis.call('HMGET', prefix .. '@worker@' .. name, 'incarnation', 'owner', 'model')
    if lives(prefix, worker[1], now) and lives(prefix, worker[2], now) then
      found[worker[3]] = true
    end
  end
  for _, sid in ipairs(redis.call('SMEMBERS', prefix .. '@sessions@')) do
    local models = redis.call('HGET', prefix .. '@session@' .. sid, 'models') or ''
    if models ~= '' and (lives(prefix, sid, now) or redis.call('SCARD', prefix .. '@owned@' .. sid) > 0) then
      for first = 1, #models, @MODEL_BYTES@ do
        found[string.sub(models, first, first + @MODEL_BYTES@ - 1)] = true
      end
    end
  end
  return found
end

-- Lets a model in, if few enough others are in use. Those that were let in are written down: to ask again is cheap.
local function admits(prefix, model, now)
  if redis.call('SISMEMBER', prefix .. '@models@', model) == 1 then
    return true
  end
  local served = { model }
  for other in pairs(models_in_use(prefix, now)) do
    if other ~= model then
      served[#served + 1] = other
    end
  end
  if #served > @MAX_MODELS@ then
    return false
  end
  redis.call('DEL', prefix .. '@models@')
  redis.call('SADD', prefix .. '@models@', unpack(served))
  return true
end

local function pair(keys, args)
  local prefix, sid, name = keys[1], unpack(args)
  local key, now = prefix .. '@worker@' .. name, now_ms()
  local worker = redis.call('HMGET', key, 'incarnation', 'info', 'owner', 'model')
  local owner = worker[3]
  if not is_active(prefix, sid) or not lives(prefix, worker[1], now) then
    return false
  end
  if owner and owner ~= sid and redis.call('EXISTS', prefix .. '@session@' .. owner) == 1 then
    return false
  end
  local session_key = prefix .. '@session@' .. worker[1]
  if not admits(prefix, worker[4], now) then
    redis.call('HSET', session_key, 'unwanted', '1')
    return 0
  end
  redis.call('HDEL', session_key, 'unwanted')
  redis.call('HSET', key, 'owner', sid)
  touch(prefix, 'w' .. name)
  return { worker[1], worker[2], last_id(prefix .. '@results@' .. name) }
end

local function unpair(keys, args)
  local prefix, sid, name = keys[1], unpack(args)
  local key = prefix .. '@worker@' .. name
  if redis.call('HGET', key, 'owner') == sid then
    redis.call('HDEL', key, 'owner')
    touch(prefix, 'w' .. name)
  end
  return 1
end

local function lease_shard(keys, args)
  local prefix, sid, shard, held, num_read = keys[1], unpack(args)
  local holder = redis.call('HGET', prefix .. '@shards@', shard)
  if not is_active(prefix, sid) or (holder ~= sid and (held == '1' or lives(prefix, holder, now_ms()))) then
    return 0
  end
  redis.call('HSET', prefix .. '@shards@', shard, sid)
  redis.call('HSET', prefix .. '@read@', shard, num_read)
  return 1
end

local function log_backlogs(keys, args)
  local prefix, backlogs = keys[1], {}
  for i, shard in ipairs(args) do
    local num_read = redis.call('HGET', prefix .. '@read@', shard) or 0
    backlogs[i] = math.max(0, redis.call('XLEN', prefix .. '@tokens@' .. shard) - num_read)
  end
  return backlogs
end

local function release_shard(keys, args)
  local prefix, sid, shard = keys[1], unpack(args)
  if redis.call('HGET', prefix .. '@shards@', shard) == sid then
    redis.call('HDEL', prefix .. '@shards@', shard)
    redis.call('HDEL', prefix .. '@read@', shard)
  end
  return 1
end
