-- A request's way: PROMPT, READY, RUNNING, ENDED, and what is asked about it.

local MARK_TTL_S = '60' -- how long a cancel waits for its request
local NOT_YET = 0 -- instead of a list: the server was restarted, and the pool waits for its gateways
local MEMORY_SHARE = 0.8 -- of maxmemory; submit refuses above it
local LOOK_MS, LOOK_BYTES = 1000, 1e6 -- so long, and for so much that is submitted, a look at the memory is good
local REQUEST_BYTES = 1000 -- what a request takes besides what it brings

local memory = { is_short = false, looked_ms = 0, good_ms = 0, num_bytes = 0 }

-- To look costs a third of a submit, half of one that comes alone. Short memory is looked at again in a millisecond.
local function is_short_of_memory(now, num_bytes)
  memory.num_bytes = memory.num_bytes + num_bytes + REQUEST_BYTES
  local age_ms = now - memory.looked_ms
  -- Below zero: the clock was set back.
  if age_ms < 0 or age_ms >= memory.good_ms or memory.num_bytes > LOOK_BYTES then
    local info = redis.call('INFO', 'memory')
    local limit = tonumber(string.match(info, 'maxmemory:(%d+)'))
    memory.is_short = limit > 0 and tonumber(string.match(info, 'used_memory:(%d+)')) > MEMORY_SHARE * limit
    memory.looked_ms, memory.good_ms, memory.num_bytes = now, memory.is_short and 1 or LOOK_MS, 0
  end
  return memory.is_short
end

local function request_key(prefix, id)
  return prefix .. '@request@' .. hex(id)
end

local function checkpoint_key(prefix, id)
  return prefix .. '@checkpoint@' .. hex(id)
end

-- Where fields are in what `stored` returns.
local STATE, HEADER, BODY, META, ROUTE, SHARD, OWNER = 3, 4, 5, 6, 7, 8, 9

-- With the prompt or its token ids for those who read them: either may be large.
local function stored(key, id, part)
  local request =
    redis.call('HMGET', key, 'tenant', 'state', 'header', 'body', 'meta', 'route', 'shard', 'owner', 'cancel', 'strikes',
      'struck_at', 'witness', 'model')
  table.insert(request, 1, id)
  request[13] = request[13] and cmsgpack.unpack(request[13]) or {}
  request[15] = part and redis.call('HGET', key, part)
  return request
end

local function acknowledge(stream, group, entry_id)
  redis.call('XACK', stream, group, entry_id)
  redis.call('XDEL', stream, entry_id)
end

local function delete_hint(prefix, entry_id)
  if entry_id ~= '' then
    acknowledge(prefix .. '@prompts@', '@TOKENIZERS@', entry_id)
  end
end

local function open(prefix, id, shard, route, header, body, meta)
  redis.call('XADD', prefix .. '@tokens@' .. shard, '*', '@REQUEST@', id, '@ROUTE@', route,
    '@HEADER@', header, '@BODY@', body, '@META@', meta or '')
end

local function hint_prompt(prefix, id, sent_ns, header, body, prompt)
  -- With a copy of the request, which saves its tokenizer a round trip; the hint is deleted when it has its tokens.
  redis.call('XADD', prefix .. '@prompts@', '*', '@REQUEST@', id, '@SENT_NS@', sent_ns, '@HEADER@', header,
    '@BODY@', body, '@PROMPT@', prompt)
end

local function hint_request(prefix, id, sent_ns)
  redis.call('XADD', prefix .. '@requests@', '*', '@REQUEST@', id, '@SENT_NS@', sent_ns)
end

-- What clients have of each sequence; one that extends what is known of a sequence replaces it, no other does.
local function keep_witness(key, witness, model)
  local known = redis.call('HGET', key, 'witness')
  local sequences = known and cmsgpack.unpack(known) or {}
  local has_grown = false
  for i, tokens in ipairs(witness) do
    local before = sequences[i] or ''
    if #tokens > #before and string.sub(tokens, 1, #before) == before then
      has_grown = true
    else
      tokens = before
    end
    sequences[i] = tokens
  end
  if has_grown then
    redis.call('HSET', key, 'witness', cmsgpack.pack(sequences), 'model', model)
  end
end

-- Whoever had the route, and lives, asks again and learns that it lost it.
local function set_route(prefix, key, id, before, route, routed_ms)
  redis.call('HSET', key, 'route', route, 'routed', present_term(prefix), 'routed_ms', routed_ms)
  if before ~= route and is_active(prefix, hex(before)) then
    redis.call('XADD', prefix .. '@text@' .. hex(before), 'MAXLEN', '~', '@TEXT_CAP@', '*', '@REQUEST@', id)
  end
end

local function confirm(prefix, key, id, route, routed_ms, sent_ns, witness, model)
  local request = redis.call('HMGET', key, 'state', 'header', 'body', 'routed', 'prompt', 'route', 'routed_ms')
  if request[1] == 'ENDED' then
    return
  end
  keep_witness(key, witness, model)
  -- The last gateway to which its client came: the attachment to it may be lost.
  if request[4] ~= present_term(prefix) or tonumber(routed_ms) > tonumber(request[7]) then
    set_route(prefix, key, id, request[6], route, routed_ms)
  end
  if request[1] == 'PROMPT' then
    hint_prompt(prefix, id, sent_ns, request[2], request[3], request[5])
  elseif request[1] == 'READY' then
    hint_request(prefix, id, sent_ns)
  end
end

-- After the fixed arguments the witness, a string of tokens for each sequence; none: the request is new.
local function submit(keys, args)
  local prefix, id, tenant, header, body, prompt = keys[1], unpack(args, 1, 5)
  local digest, route, routed_ms, sent_ns, reply, tokens, due_ms = unpack(args, 6, 12)
  local bounds, model, metered = { unpack(args, 13, 16) }, args[17], read_metered(args[18])
  local witness = { unpack(args, 19) }
  local digits, now = hex(id), now_ms()
  local key = prefix .. '@request@' .. digits
  local known = redis.call('HMGET', key, 'digest', 'tenant')
  if known[1] then
    if known[1] ~= digest or known[2] ~= tenant then
      return 2
    end
    if #witness > 0 then
      confirm(prefix, key, id, route, routed_ms, sent_ns, witness, model)
    end
    return 1
  end
  local waiting = counts_for(prefix, tenant)
  if #witness == 0 then
    local refused = (metered and limit_refusal(prefix, metered, digits, now)) or refusal(waiting, tokens, bounds)
    if refused then
      return refused
    end
    if is_short_of_memory(now, #header + #body + #prompt) then
      return 3
    end
  end
  local reason = '0'
  local mark_key = prefix .. '@mark@' .. digits
  local mark = redis.call('HMGET', mark_key, 'reason', 'tenant')
  if mark[1] then
    if not mark[2] or mark[2] == tenant then
      reason = mark[1]
    end
    redis.call('DEL', mark_key)
  end
  redis.call('HSET', key, 'tenant', tenant, 'state', 'PROMPT', 'header', header, 'body', body, 'prompt', prompt,
    'digest', digest, 'reply', reply, 'route', route, 'routed', present_term(prefix), 'routed_ms', routed_ms,
    'cancel', reason, 'strikes', '0', 'struck_at', '0', 'waits', tokens)
  begin_waiting(prefix, waiting, digits, tokens, reason == '0' and due_ms or AT_ONCE, now)
  if metered then
    begin_metered(prefix, metered, key, digits, now, #witness > 0)
  end
  if #witness > 0 then
    keep_witness(key, witness, model)
  end
  hint_prompt(prefix, id, sent_ns, header, body, prompt)
  return 0
end

local function fetch(keys, args)
  local key = request_key(keys[1], args[1])
  return redis.call('EXISTS', key) == 1 and stored(key, args[1], 'prompt')
end

local function tokenized(keys, args)
  local prefix, id, entry_id, meta, sent_ns, tokens, token_ids = keys[1], unpack(args)
  local key = request_key(prefix, id)
  delete_hint(prefix, entry_id)
  local request = redis.call('HMGET', key, 'state', 'waits', 'tenant', 'key', 'counted', 'counted_at')
  if request[1] ~= 'PROMPT' then
    return 0
  end
  if request[4] and request[2] then
    recount(prefix, key, request[4], request[5], request[6], request[5] + tokens - request[2], false)
  end
  redis.call('HSET', key, 'state', 'READY', 'meta', meta, 'tokens', token_ids)
  set_waiting_tokens(prefix, key, request[2], request[3], tokens)
  hint_request(prefix, id, sent_ns)
  return 1
end

local function reject(keys, args)
  local prefix, id, entry_id, shard, row = keys[1], unpack(args)
  local key = request_key(prefix, id)
  delete_hint(prefix, entry_id)
  local state = redis.call('HGET', key, 'state')
  if state ~= 'PROMPT' and state ~= 'READY' then
    return 0
  end
  end_waiting(prefix, { id }, false)
  redis.call('HSET', key, 'state', 'RUNNING', 'shard', shard)
  open(prefix, id, shard, unpack(redis.call('HMGET', key, 'route', 'header', 'body', 'meta')))
  redis.call('XADD', prefix .. '@tokens@' .. shard, '*', '@PAYLOAD@', row)
  return 1
end

-- What waits for tokens or a scheduler and is cancelled or past its time: for `reject`. Who has tokens already needs an
-- end after them, which only a scheduler can write.
local function overdue(keys, args)
  local prefix, count = keys[1], args[1]
  local found = {}
  for _, digits in ipairs(redis.call('ZRANGEBYSCORE', prefix .. '@due@', '-inf', whole(now_ms()), 'LIMIT', 0, count)) do
    if redis.call('HEXISTS', prefix .. '@request@' .. digits, 'witness') == 0 then
      found[#found + 1] = stored(prefix .. '@request@' .. digits, unhex(digits))
    end
  end
  return found
end

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then
      return fields[i + 1]
    end
  end
end

local function request_id(fields)
  local id = field(fields, '@REQUEST@')
  return id and #id == 16 and id
end

local function bury(prefix, stream, fields)
  redis.call('XADD', prefix .. '@dead@', 'MAXLEN', '~', '@DEAD_CAP@', '*', '@STREAM@', stream, '@WHY@', '@NO_REQUEST@',
    unpack(fields, 1, math.min(#fields, 2 * @MAX_DEAD_FIELDS@)))
end

local function claim(keys, args)
  local prefix, sid, count, shard = keys[1], unpack(args)
  if not is_active(prefix, sid) then
    return false
  end
  if not settle(prefix) then
    return NOT_YET
  end
  local stream, wanted, claimed, sent, num_buried = prefix .. '@requests@', tonumber(count), {}, {}, 0
  while #claimed < wanted do
    local missing = wanted - #claimed
    local head = redis.call('XRANGE', stream, '-', '+', 'COUNT', whole(missing))
    local read, taken = {}, {}
    for _, entry in ipairs(head) do
      read[#read + 1] = entry[1]
      local id = request_id(entry[2])
      local digits = id and hex(id)
      local request = id and stored(prefix .. '@request@' .. digits, id, 'tokens')
      if not id then
        bury(prefix, stream, entry[2])
        num_buried = num_buried + 1
      elseif request[STATE] == 'READY' then
        request[STATE], request[SHARD], request[OWNER] = 'RUNNING', shard, sid
        redis.call('HSET', prefix .. '@request@' .. digits, 'state', 'RUNNING', 'shard', shard, 'owner', sid)
        open(prefix, id, shard, request[ROUTE], request[HEADER], request[BODY], request[META])
        taken[#taken + 1], claimed[#claimed + 1] = digits, request
        sent[#sent + 1] = field(entry[2], '@SENT_NS@') or ''
      end
    end
    with_all('XDEL', stream, read)
    with_all('SADD', prefix .. '@owned@' .. sid, taken)
    with_all('ZREM', prefix .. '@due@', taken) -- their scheduler sees to their time from now on
    if #head < missing then
      break
    end
  end
  return { claimed, num_buried, redis.call('XLEN', stream) + redis.call('XLEN', prefix .. '@prompts@'), sent }
end

local function take(keys, args)
  local prefix, sid, dead = keys[1], unpack(args)
  if sid == dead or not is_active(prefix, sid) then
    return false
  end
  if not settle(prefix) then
    return NOT_YET
  end
  local deadline = redis.call('HGET', prefix .. '@session@' .. dead, 'until')
  if deadline then
    if tonumber(deadline) > now_ms() then
      return false
    end
    forget_session(prefix, dead)
  end
  local moved = sorted_members(prefix .. '@owned@' .. dead)
  for _, id in ipairs(moved) do
    redis.call('HSET', prefix .. '@request@' .. id, 'owner', sid)
    redis.call('SADD', prefix .. '@owned@' .. sid, id)
  end
  redis.call('DEL', prefix .. '@owned@' .. dead)
  return moved
end

local function strike(keys, args)
  local prefix, sid = keys[1], args[1]
  if not is_active(prefix, sid) then
    return 0
  end
  for i = 2, #args, 3 do
    local key = request_key(prefix, args[i])
    if redis.call('HGET', key, 'owner') == sid then
      redis.call('HSET', key, 'strikes', args[i + 1], 'struck_at', args[i + 2])
    end
  end
  return 1
end

-- Requests of a scheduler become those of another that lives. The answer is what the first one owns no more.
local function hand_over(keys, args)
  local prefix, sid, receiver = keys[1], args[1], args[2]
  if not is_active(prefix, sid) then
    return false
  end
  local is_there, moved, gone = receiver ~= sid and lives(prefix, receiver, now_ms()), {}, {}
  for i = 3, #args do
    local key, digits = request_key(prefix, args[i]), hex(args[i])
    local is_owned = redis.call('HGET', key, 'owner') == sid
    if is_owned and is_there then
      redis.call('HSET', key, 'owner', receiver)
      redis.call('SMOVE', prefix .. '@owned@' .. sid, prefix .. '@owned@' .. receiver, digits)
      moved[#moved + 1] = digits
    end
    if is_there or not is_owned then
      gone[#gone + 1] = digits
    end
  end
  if #moved > 0 then
    touch(prefix, 's' .. receiver)
  end
  return gone
end

local function owned(keys, args)
  local prefix, sid = keys[1], args[1]
  return is_active(prefix, sid) and sorted_members(prefix .. '@owned@' .. sid)
end

local function load(keys, args)
  local prefix, sid = keys[1], args[1]
  if not is_active(prefix, sid) then
    return false
  end
  if not is_settled(prefix) then
    return NOT_YET
  end
  local requests, logs, checkpoints, seen = {}, {}, {}, {}
  for i = 2, #args do
    local key = request_key(prefix, args[i])
    local request = redis.call('HMGET', key, 'owner', 'shard')
    local shard = request[2]
    if request[1] == sid then
      requests[#requests + 1] = stored(key, args[i], 'tokens')
      local checkpoint = redis.call('GET', checkpoint_key(prefix, args[i]))
      if checkpoint then
        checkpoints[#checkpoints + 1] = { args[i], checkpoint }
      end
      if not seen[shard] then
        seen[shard] = true
        logs[#logs + 1] = { shard, redis.call('XRANGE', prefix .. '@tokens@' .. shard, '-', '+') }
      end
    end
  end
  return { requests, logs, checkpoints }
end

-- The hot one: sid, worker, plan, ids of requests that got their first slot, then shard and row in turn.
local function commit(keys, args)
  local prefix = keys[1]
  if redis.call('HGET', prefix .. '@session@' .. args[1], 'state') ~= 'active' then
    return 0
  end
  local started = {}
  for first = 1, #args[4], 16 do
    started[#started + 1] = string.sub(args[4], first, first + 15)
  end
  end_waiting(prefix, started, true)
  for i = 5, #args, 2 do
    redis.call('XADD', prefix .. '@tokens@' .. args[i], '*', '@PAYLOAD@', args[i + 1])
  end
  if args[3] ~= '' then
    redis.call('XADD', prefix .. '@steps@' .. args[2], 'MAXLEN', '~', '@STEPS_CAP@', '*', '@PAYLOAD@', args[3])
  end
  return 1
end

-- Beside the log, in the request's hash: they go with it. A request that is gone, or has ended, is nobody's any more.
local function keep_prompt_output(keys, args)
  local key = request_key(keys[1], args[1])
  local state = redis.call('HGET', key, 'state')
  if not state or state == 'ENDED' or redis.call('HEXISTS', key, args[2]) == 1 then
    return 0
  end
  redis.call('HSET', key, args[2], args[3])
  return 1
end

local function leases_shard(prefix, sid, shard)
  return redis.call('HGET', prefix .. '@shards@', shard) == sid and is_active(prefix, sid)
end

-- After the five fixed arguments id, result and trace in turn; the fifth is their tokens, in that order, or empty.
local function retire(keys, args)
  local prefix, sid, shard, ttl, route, used = keys[1], unpack(args, 1, 5)
  if not leases_shard(prefix, sid, shard) then
    return 0
  end
  local ended, checkpoints, owned, tokens = {}, {}, {}, string.gmatch(used, '%d+')
  for i = 6, #args, 3 do
    local num_tokens = tokens()
    local id, result = args[i], args[i + 1]
    local digits = hex(id)
    local key = prefix .. '@request@' .. digits
    local request = redis.call('HMGET', key, 'state', 'shard', 'owner', 'route', 'waits', 'key', 'counted', 'counted_at')
    if request[1] == 'RUNNING' and request[2] == shard then
      if request[6] then
        end_metered(prefix, request[6], digits)
        if num_tokens then
          recount(prefix, key, request[6], request[7], request[8], tonumber(num_tokens), true)
        end
      end
      ended[#ended + 1], checkpoints[#checkpoints + 1] = digits, prefix .. '@checkpoint@' .. digits
      if tonumber(ttl) > 0 then
        redis.call('SET', prefix .. '@result@' .. digits, result, 'PX', ttl)
      end
      local owner, now = request[3], request[4]
      if owner then
        owned[owner] = owned[owner] or {}
        table.insert(owned[owner], digits)
      end
      if request[5] then
        end_waiting(prefix, { id }, false)
      end
      redis.call('HDEL', key, 'owner', 'header', 'body', 'prompt', 'meta', 'tokens', 'witness', 'model')
      redis.call('HSET', key, 'state', 'ENDED')
      trace(prefix, key, args[i + 2])
      redis.call('PEXPIRE', key, ttl)
      if now ~= route and is_active(prefix, hex(now)) then -- attached meanwhile; the result has the rest
        redis.call('XADD', prefix .. '@text@' .. hex(now), 'MAXLEN', '~', '@TEXT_CAP@', '*', '@REQUEST@', id)
      end
    end
  end
  if #ended == 0 then
    return 0
  end
  for owner, ids in pairs(owned) do
    with_all('SREM', prefix .. '@owned@' .. owner, ids)
  end
  if redis.call('UNLINK', unpack(checkpoints)) > 0 then
    with_all('ZREM', prefix .. '@checkpoints@' .. shard, ended)
  end
  return 5 + 3 * #ended == #args and 1 or 0
end

-- While the pool settles, a request that is not there may be one that its gateway has yet to tell of.
local function unknown(prefix, tenant)
  return not tenant and not is_settled(prefix) and NOT_YET
end

local function recall(keys, args)
  local prefix, id, tenant = keys[1], unpack(args)
  local request = redis.call('HMGET', request_key(prefix, id), 'tenant', 'state', 'reply', 'delivered')
  if request[1] ~= tenant then
    return unknown(prefix, request[1])
  end
  local result = request[2] == 'ENDED' and redis.call('GET', prefix .. '@result@' .. hex(id))
  return { request[2], request[3] or '', result, request[4] or '0' }
end

-- An attachment may be carried out long after it was sent, and a call begin long after its client came. Gateways know
-- the server's clock but roughly. A server with another clock is another term.
local function came_long_before(prefix, routed_ms, request)
  return request[5] == present_term(prefix) and tonumber(routed_ms) + @CAME_TOGETHER_MS@ < tonumber(request[6])
end

local function attach(keys, args)
  local prefix, id, tenant, route, routed_ms, offsets, held = keys[1], unpack(args)
  local key = request_key(prefix, id)
  local request = redis.call('HMGET', key, 'tenant', 'state', 'shard', 'route', 'routed', 'routed_ms')
  if request[1] ~= tenant then
    return unknown(prefix, request[1])
  end
  if request[2] == 'ENDED' then
    return { request[2], redis.call('GET', prefix .. '@result@' .. hex(id)), 0 }
  end
  local before = request[4]
  if before ~= route and before ~= held and (held ~= '' or came_long_before(prefix, routed_ms, request)) then
    return { request[2], false, 1 }
  end
  set_route(prefix, key, id, before, route, routed_ms)
  if request[3] then
    redis.call('XADD', prefix .. '@attach@' .. request[3], 'MAXLEN', '~', '@ATTACH_CAP@', '*', '@REQUEST@', id,
      '@ROUTE@', route, '@OFFSETS@', offsets)
  end
  return { request[2], false, 0 }
end

-- A sixth argument is the tenant.
local function cancel(keys, args)
  local prefix, id, reason, sent_ns, sequence, route, tenant = keys[1], unpack(args)
  local key = request_key(prefix, id)
  local request = redis.call('HMGET', key, 'tenant', 'state', 'cancel', 'route')
  local for_all = tonumber(sequence) < 0
  if not request[1] then
    if for_all and route == '' then
      local mark_key = prefix .. '@mark@' .. hex(id)
      redis.call('DEL', mark_key)
      redis.call('HSET', mark_key, 'reason', reason)
      if tenant then
        redis.call('HSET', mark_key, 'tenant', tenant)
      end
      redis.call('EXPIRE', mark_key, MARK_TTL_S)
    end
    return 0
  end
  if (tenant and request[1] ~= tenant) or (route ~= '' and request[4] ~= route) then
    return 0
  end
  if request[2] == 'ENDED' then
    return 1
  end
  if for_all then
    if request[3] ~= '0' then -- its hint is there, or whoever has the request has read it or the flag
      return 1
    end
    redis.call('HSET', key, 'cancel', reason)
  end
  if for_all and (request[2] == 'PROMPT' or request[2] == 'READY') and redis.call('HEXISTS', key, 'waits') == 1 then
    redis.call('ZADD', prefix .. '@due@', AT_ONCE, hex(id))
  end
  -- However many they are: only what every scheduler that lives has read may go.
  redis.call('XADD', prefix .. '@cancels@', 'MINID', '~', whole(now_ms() - @CANCELS_KEPT_MS@), '*', '@REQUEST@', id,
    '@SEQUENCE@', sequence, '@REASON@', reason, '@SENT_NS@', sent_ns)
  return 1
end
