-- Requests that have ended and are to be told to a collector of traces: what `retire` and `delivered` write for it.

-- A collector that is away must not fill the server.
local function tell(prefix, record, delivered_ns)
  if redis.call('XLEN', prefix .. '@traces@') >= @TRACES_CAP@ then
    redis.call('HINCRBY', prefix .. '@untold@', '@UNTOLD_TRACES@', 1)
  else
    redis.call('XADD', prefix .. '@traces@', '*', '@PAYLOAD@', record, '@DELIVERED_NS@', delivered_ns)
  end
end

-- A client may have its last token before its request is retired.
local function trace(prefix, key, record)
  if record == '' then
    return
  end
  tell(prefix, record, '')
  local delivered_ns = redis.call('HGET', key, 'delivered')
  if delivered_ns then
    tell(prefix, record, delivered_ns)
  else
    redis.call('HSET', key, 'trace', record)
  end
end

-- Id and Unix time in nanoseconds in turn.
local function delivered(keys, args)
  local prefix = keys[1]
  for i = 1, #args, 2 do
    local key = prefix .. '@request@' .. hex(args[i])
    if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'delivered') == 0 then
      redis.call('HSET', key, 'delivered', args[i + 1])
      local record = redis.call('HGET', key, 'trace')
      if record then
        redis.call('HDEL', key, 'trace')
        tell(prefix, record, args[i + 1])
      end
    end
  end
end
