-- Every change of a request's or a session's state, each one atomic.
--
-- KEYS[1] is the pool's prefix, hash tag included, so that a call goes to the pool's slot; other names are made from it
-- as keys.py lists them. Session ids come in hexadecimal, request ids and routes as 16 bytes. Every function checks
-- before it writes, and may be called again. Words between @ signs are filled in from keys.py by library.py: keys in
-- small letters, all else in capitals.

local HEX = {}

local function hex(bytes)
  if not HEX.a then -- filled at the first call: a library has no standard functions while it loads
    for byte = 0, 255 do
      HEX[string.char(byte)] = string.format('%02x', byte)
    end
  end
  return (string.gsub(bytes, '.', HEX))
end

local function unhex(digits)
  return (string.gsub(digits, '..', function(pair) return string.char(tonumber(pair, 16)) end))
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Only into a capped stream, and only when the server has refused the command itself for want of memory.
local function append(_, args)
  return redis.call('XADD', args[1], 'MAXLEN', '~', args[2], '*', unpack(args, 3))
end

local function sorted_members(key)
  local members = redis.call('SMEMBERS', key)
  table.sort(members)
  return members
end

-- A command that takes many members, unless there are none. A call costs more than what it does.
local function with_all(command, key, many)
  if #many > 0 then
    redis.call(command, key, unpack(many))
  end
end
