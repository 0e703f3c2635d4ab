-- What waits for its first slot: counted by requests and prompt tokens, for the pool and for each tenant, and found
-- again when its time is over. A request counts for as long as its field `waits` is there, which holds its tokens.

local RATE_MS = 10000 -- how far back the rate of starts looks, roughly
local AT_ONCE = '1' -- a due time; 0 is none

-- The counts of the pool, or of a tenant.
local function waiting_key(prefix, tenant)
  return tenant and prefix .. 'waiting:' .. tenant or prefix .. 'waiting'
end

local function counted(key)
  local counts = redis.call('HMGET', key, 'requests', 'tokens')
  return tonumber(counts[1] or 0), tonumber(counts[2] or 0)
end

-- Milliseconds in which all that waits would start, at the rate of late; 0: nothing has started lately.
local function wait_ms(key)
  local waiting = redis.call('HMGET', key, 'requests', 'since', 'started')
  if not waiting[1] or waiting[3] == '0' then
    return 0
  end
  return math.ceil(waiting[1] * math.max(1, now_ms() - waiting[2]) / waiting[3])
end

-- Why a request may not wait too: {0 for the pool or 1 for the tenant, 0 for requests or 1 for tokens, wait_ms}.
local function refusal(prefix, tenant, tokens, bounds)
  for whose = 0, 1 do
    local key = waiting_key(prefix, whose == 1 and tenant)
    local num_requests, num_tokens = counted(key)
    local max_requests, max_tokens = tonumber(bounds[2 * whose + 1]), tonumber(bounds[2 * whose + 2])
    if max_requests > 0 and num_requests >= max_requests then
      return { whose, 0, wait_ms(key) }
    end
    -- One that is longer than the bound may wait alone.
    if max_tokens > 0 and num_requests > 0 and num_tokens + tonumber(tokens) > max_tokens then
      return { whose, 1, wait_ms(key) }
    end
  end
end

local function begin_waiting(prefix, key, id, tenant, tokens, due_ms)
  redis.call('HSET', key, 'waits', tokens)
  for _, counts in ipairs({ waiting_key(prefix), waiting_key(prefix, tenant) }) do
    if redis.call('HINCRBY', counts, 'requests', 1) == 1 then
      redis.call('HSET', counts, 'since', whole(now_ms()), 'started', 0)
    end
    redis.call('HINCRBY', counts, 'tokens', tokens)
  end
  if due_ms ~= '0' then
    redis.call('ZADD', prefix .. 'due', due_ms, hex(id))
  end
end

local function set_waiting_tokens(prefix, key, tokens)
  local request = redis.call('HMGET', key, 'waits', 'tenant')
  if request[1] then
    redis.call('HSET', key, 'waits', tokens)
    for _, counts in ipairs({ waiting_key(prefix), waiting_key(prefix, request[2]) }) do
      redis.call('HINCRBY', counts, 'tokens', tokens - request[1])
    end
  end
end

local function note_start(counts)
  local now, since = now_ms(), tonumber(redis.call('HGET', counts, 'since'))
  local started = redis.call('HINCRBY', counts, 'started', 1)
  if now - since > RATE_MS then
    redis.call('HSET', counts, 'since', whole(since + math.floor((now - since) / 2)), 'started',
      math.ceil(started / 2))
  end
end

local function end_waiting(prefix, key, id, has_started)
  local request = redis.call('HMGET', key, 'waits', 'tenant')
  if not request[1] then
    return
  end
  redis.call('HDEL', key, 'waits')
  redis.call('ZREM', prefix .. 'due', hex(id))
  for _, counts in ipairs({ waiting_key(prefix), waiting_key(prefix, request[2]) }) do
    if redis.call('HINCRBY', counts, 'requests', -1) == 0 then
      redis.call('DEL', counts)
    else
      redis.call('HINCRBY', counts, 'tokens', 0 - request[1])
      if has_started then
        note_start(counts)
      end
    end
  end
end

local function count_waiting(keys, args)
  local prefix, tenant = keys[1], args[1]
  local num_requests, num_tokens = counted(waiting_key(prefix))
  local num_tenants, num_tenants_tokens = counted(waiting_key(prefix, tenant))
  return { num_requests, num_tokens, num_tenants, num_tenants_tokens }
end
