-- What waits for its first slot: counted by requests and prompt tokens, for the pool and for each tenant, and found
-- again when its time is over. A request counts for as long as its field `waits` is there, which holds its tokens.

local RATE_MS = 10000 -- how far back the rate of starts looks, roughly
local AT_ONCE = '1' -- a due time; 0 is none

-- The counts of the pool, or of a tenant.
local function waiting_key(prefix, tenant)
  return tenant and prefix .. '@waiting@:' .. tenant or prefix .. '@waiting@'
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

-- The same for whoever only wants to know: while nothing has started since the first of what waits came, how long ago
-- that was, which is the least that it can be.
local function expected_wait_ms(key)
  local waiting = redis.call('HMGET', key, 'since', 'started')
  if waiting[2] == '0' then
    return math.max(0, now_ms() - waiting[1])
  end
  return wait_ms(key)
end

-- The counts of the pool and of a tenant: {key, requests, tokens} each.
local function counts_for(prefix, tenant)
  local pool, own = waiting_key(prefix), waiting_key(prefix, tenant)
  return { { pool, counted(pool) }, { own, counted(own) } }
end

-- Why a request may not wait too: {0 for the pool or 1 for the tenant, 0 for requests or 1 for tokens, wait_ms}.
local function refusal(both, tokens, bounds)
  for whose = 0, 1 do
    local key, num_requests, num_tokens = unpack(both[whose + 1])
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

-- The request's own count, `waits`, is written with the request.
local function begin_waiting(prefix, both, digits, tokens, due_ms, now)
  for _, counts in ipairs(both) do
    local key, num_requests, num_tokens = unpack(counts)
    if num_requests == 0 then
      redis.call('HSET', key, 'requests', 1, 'tokens', tokens, 'since', whole(now), 'started', 0)
    else
      redis.call('HSET', key, 'requests', num_requests + 1, 'tokens', whole(num_tokens + tokens))
    end
  end
  if due_ms ~= '0' then
    redis.call('ZADD', prefix .. '@due@', due_ms, digits)
  end
end

local function set_waiting_tokens(prefix, key, before, tenant, tokens)
  if before and before ~= tokens then
    redis.call('HSET', key, 'waits', tokens)
    for _, counts in ipairs({ waiting_key(prefix), waiting_key(prefix, tenant) }) do
      redis.call('HINCRBY', counts, 'tokens', tokens - before)
    end
  end
end

local function note_starts(counts, number)
  local now, since = now_ms(), tonumber(redis.call('HGET', counts, 'since'))
  local started = redis.call('HINCRBY', counts, 'started', number)
  if now - since > RATE_MS then
    redis.call('HSET', counts, 'since', whole(since + math.floor((now - since) / 2)), 'started',
      math.ceil(started / 2))
  end
end

-- Requests that have started or ended together: each count changes once.
local function end_waiting(prefix, ids, have_started)
  local order, left, due = {}, {}, {}
  for _, id in ipairs(ids) do
    local digits = hex(id)
    local key = prefix .. '@request@' .. digits
    local request = redis.call('HMGET', key, 'waits', 'tenant')
    if request[1] then
      redis.call('HDEL', key, 'waits')
      due[#due + 1] = digits
      for _, counts in ipairs({ waiting_key(prefix), waiting_key(prefix, request[2]) }) do
        if not left[counts] then
          order[#order + 1], left[counts] = counts, { 0, 0 }
        end
        left[counts][1], left[counts][2] = left[counts][1] + 1, left[counts][2] + request[1]
      end
    end
  end
  if #due > 0 then
    redis.call('ZREM', prefix .. '@due@', unpack(due))
  end
  for _, counts in ipairs(order) do
    local requests, tokens = unpack(left[counts])
    if redis.call('HINCRBY', counts, 'requests', 0 - requests) == 0 then
      redis.call('DEL', counts)
    else
      redis.call('HINCRBY', counts, 'tokens', 0 - tokens)
      if have_started then
        note_starts(counts, requests)
      end
    end
  end
end

local function count_waiting(keys, args)
  local prefix, tenant = keys[1], args[1]
  local num_requests, num_tokens = counted(waiting_key(prefix))
  local num_tenants, num_tenants_tokens = counted(waiting_key(prefix, tenant))
  return { num_requests, num_tokens, num_tenants, num_tenants_tokens, expected_wait_ms(waiting_key(prefix)) }
end
