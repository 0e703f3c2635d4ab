-- What the requests of an API key use: calls, tokens and ends of the last minute, by whole seconds, and which of them
-- go on.
-- A request tells its key by its field `key`; `counted` is how many tokens it counts for, in the second `counted_at`.

local WINDOW_S = 60 -- and the second that goes on: so never more in any minute than is allowed

local function rate_key(prefix, key)
  return prefix .. '@rate@' .. key
end

local function running_key(prefix, key)
  return prefix .. '@running@' .. key
end

-- What `submit` is told of a key, in the order of its words; nothing if there is no key to be counted.
local function read_metered(text)
  local words = {}
  for word in string.gmatch(text, '%S+') do
    words[#words + 1] = word
  end
  return words[1] and {
    key = words[1], rpm = tonumber(words[2]), tpm = tonumber(words[3]), max_running = tonumber(words[4]),
    tokens = tonumber(words[5]), call_tokens = tonumber(words[6]), call_requests = tonumber(words[7]), leader = words[8],
  }
end

-- What was used, as {second, amount}, the oldest first, and the sum; and the names of what is too old to count.
local function used_lately(key, now)
  local counts, used, sums, old = redis.call('HGETALL', key), { r = {}, t = {}, e = {} }, { r = 0, t = 0, e = 0 }, {}
  local earliest = math.floor(now / 1000) - WINDOW_S
  for i = 1, #counts, 2 do
    local what, second = string.sub(counts[i], 1, 1), tonumber(string.sub(counts[i], 2))
    if second < earliest then
      old[#old + 1] = counts[i]
    else
      local amount = tonumber(counts[i + 1])
      table.insert(used[what], { second, amount })
      sums[what] = sums[what] + amount
    end
  end
  for _, each in pairs(used) do
    table.sort(each, function(one, other) return one[1] < other[1] end)
  end
  return used, sums, old
end

-- Milliseconds until so much more is allowed; 0: now. What alone is more than the limit is allowed beside nothing.
local function time_until_allowed(used, sum, wanted, limit, now)
  if limit == 0 or sum == 0 or sum + wanted <= limit then
    return 0
  end
  for _, each in ipairs(used) do
    sum = sum - each[2]
    if sum == 0 or sum + wanted <= limit then
      return (each[1] + WINDOW_S + 1) * 1000 - now
    end
  end
end

-- Milliseconds in which one of a key's requests ends, at the rate of late; 0: none has ended lately.
local function time_until_end(key, now)
  local used, sums = used_lately(key, now)
  return sums.e > 0 and math.ceil((now - used.e[1][1] * 1000) / sums.e) or 0
end

-- Why a request may not come: {2, which limit, milliseconds until it may}. The first of a call stands for all of it:
-- the others come if it has.
local function limit_refusal(prefix, metered, digits, now)
  local is_leader = metered.leader == digits
  if not is_leader and redis.call('EXISTS', prefix .. '@request@' .. metered.leader) == 0 then
    return { 2, 0, 0 }
  end
  if is_leader and (metered.rpm > 0 or metered.tpm > 0) then
    local used, sums = used_lately(rate_key(prefix, metered.key), now)
    local for_calls = time_until_allowed(used.r, sums.r, 1, metered.rpm, now)
    local for_tokens = time_until_allowed(used.t, sums.t, metered.call_tokens, metered.tpm, now)
    if for_calls > 0 or for_tokens > 0 then
      return { 2, for_tokens > for_calls and 1 or 0, math.max(for_calls, for_tokens) }
    end
  end
  if metered.max_running > 0 then
    local wanted = is_leader and metered.call_requests or 1
    if redis.call('SCARD', running_key(prefix, metered.key)) + wanted > metered.max_running then
      return { 2, 2, time_until_end(rate_key(prefix, metered.key), now) }
    end
  end
end

-- A request of a key begins; if it was accepted before and lost, it counts as one that goes on, and for nothing else.
local function begin_metered(prefix, metered, key, digits, now, was_accepted)
  local rate, second = rate_key(prefix, metered.key), whole(math.floor(now / 1000))
  if was_accepted then
    second = '0'
  elseif metered.leader ~= digits then
    second = redis.call('HGET', prefix .. '@request@' .. metered.leader, 'counted_at') or '0'
  else
    local _, _, old = used_lately(rate, now)
    with_all('HDEL', rate, old)
    redis.call('HINCRBY', rate, 'r' .. second, 1)
    redis.call('HINCRBY', rate, 't' .. second, metered.call_tokens)
    redis.call('PEXPIRE', rate, (WINDOW_S + 2) * 1000)
  end
  redis.call('SADD', running_key(prefix, metered.key), digits)
  redis.call('HSET', key, 'key', metered.key, 'counted', whole(metered.tokens), 'counted_at', second)
end

-- A request turns out to use more or fewer tokens: as if it had been known, but what it has generated beyond what was
-- counted for it counts from now on.
local function recount(prefix, request, key, counted, counted_at, tokens, has_ended)
  local more, rate, field = tokens - tonumber(counted), rate_key(prefix, key), 't' .. counted_at
  redis.call('HSET', request, 'counted', whole(tokens))
  if more > 0 and has_ended then
    redis.call('HINCRBY', rate, 't' .. whole(math.floor(now_ms() / 1000)), more)
    redis.call('PEXPIRE', rate, (WINDOW_S + 2) * 1000)
  elseif more ~= 0 and redis.call('HEXISTS', rate, field) == 1 and redis.call('HINCRBY', rate, field, more) < 0 then
    redis.call('HSET', rate, field, 0)
  end
end

-- One of a key's requests has ended, once.
local function end_metered(prefix, key, digits)
  local rate = rate_key(prefix, key)
  redis.call('SREM', running_key(prefix, key), digits)
  redis.call('HINCRBY', rate, 'e' .. whole(math.floor(now_ms() / 1000)), 1)
  redis.call('PEXPIRE', rate, (WINDOW_S + 2) * 1000)
end
