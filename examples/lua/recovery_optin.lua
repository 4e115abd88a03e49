--[[
What a job's comment asks of slurm-recovery, read at submission as slurm_hooks/optin.py reads it.

    local optin = dofile("/etc/slurm/recovery_optin.lua")
    local wishes = optin.parse("recovery=reqeue")
    -- wishes.mode == "off"; wishes.problems[1] == "recovery='reqeue' is not known; did you mean …"

job_submit.lua and cli_filter.lua beside this file load it. Lua 5.1 to 5.4; nothing but strings is
touched, and a comment of any length ends in bounded time. tests/test_submit_filters.py holds its
verdicts to those of the Python reader.
]]

local optin = {}

local MODES = { "requeue", "hold", "off" }
local KEYS = { "recovery", "max_restarts", "checkpoint", "logs", "progress", "noncritical" }
local APS_KEYS = { "auto_resume_mode", "max_requeue_times" }

local TEXT_LIMIT = 4096 -- longer comments may have been cut on their way to a hook
local RESTARTS_LIMIT = 1000
local PATH_LIMIT = 1024
local LOGS_LIMIT = 16
local DEPTH_LIMIT = 100
local WORD_LIMIT = 64
-- How alike a foreign word must be to a key of ours to be its misspelling: comments are shared
-- with other tools, and "project" is theirs.
local TYPO_LIKENESS = 0.75

-- A problem for the owner travels as a table, so that it is told from an error of this file.
local function problem(text, ...)
    error({ problem = string.format(text, ...) }, 0)
end

local function strip(text)
    return (text:gsub("^%s+", ""):gsub("%s+$", ""))
end

local function quoted(value)
    return "'" .. tostring(value):gsub("%c", "?"):sub(1, 80) .. "'"
end

local function has(list, word)
    for _, one in ipairs(list) do
        if one == word then
            return true
        end
    end
    return false
end

-- Characters that two words share in order: the longest run, then what lies left and right of it.
local function shared(a, b)
    local best, at_a, at_b = 0, 0, 0
    for i = 1, #a do
        for j = 1, #b do
            local length = 0
            while i + length <= #a and a:byte(i + length) == b:byte(j + length) do
                length = length + 1
            end
            if length > best then
                best, at_a, at_b = length, i, j
            end
        end
    end
    if best == 0 then
        return 0
    end
    return best
        + shared(a:sub(1, at_a - 1), b:sub(1, at_b - 1))
        + shared(a:sub(at_a + best), b:sub(at_b + best))
end

local function closest(word, known, likeness)
    word = word:sub(1, WORD_LIMIT)
    local found, most = nil, likeness
    for _, one in ipairs(known) do
        local alike = 2 * shared(one, word) / math.max(1, #one + #word)
        if alike >= most then
            found, most = one, alike
        end
    end
    return found
end

local function near(key, known)
    return closest(key:lower():gsub("%-", "_"), known, TYPO_LIKENESS)
end

local function unknown(key, known)
    local meant = near(key, known) or closest(key, known, 0.5)
    local advice = meant and "did you mean " .. quoted(meant) .. "?"
        or "known: " .. table.concat(known, ", ")
    return "unknown key " .. quoted(key) .. "; " .. advice
end

-- JSON. Numbers stay as written, since 1 and 1.0 are not the same to a count of restarts.

local NULL = {}
local Number = {}
local ESCAPES = {
    b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/",
}

local function json_string(text, place)
    local parts = {}
    while true do
        local plain, sign, after = text:match('^([^"\\%c]*)(["\\])()', place)
        if not plain then
            problem("not valid JSON: a string does not end")
        end
        parts[#parts + 1] = plain
        if sign == '"' then
            return table.concat(parts), after
        end
        local letter = text:sub(after, after)
        if letter == "u" then
            local digits = text:match("^%x%x%x%x", after + 1)
            if not digits then
                problem("not valid JSON: a broken \\u")
            end
            local code = tonumber(digits, 16)
            -- No key or mode of ours has such a letter: what it is does not matter, only where.
            parts[#parts + 1] = code < 128 and string.char(code) or "?"
            place = after + 5
        elseif ESCAPES[letter] then
            parts[#parts + 1] = ESCAPES[letter]
            place = after + 1
        else
            problem("not valid JSON: an unknown escape")
        end
    end
end

local json_value

local function json_object(text, place, depth)
    local object, keys = {}, {}
    place = text:match("^%s*()", place)
    if text:sub(place, place) == "}" then
        return object, place + 1
    end
    while true do
        place = text:match('^%s*"()', place) or problem("not valid JSON: a key is expected")
        local key, value
        key, place = json_string(text, place)
        place = text:match("^%s*:()", place) or problem("not valid JSON: ':' is expected")
        value, place = json_value(text, place, depth)
        if object[key] ~= nil then
            error({ problem = "a key is there twice", twice = true }, 0)
        end
        object[key] = value
        keys[#keys + 1] = key
        local sign
        sign, place = text:match("^%s*([,}])()", place)
        if not sign then
            problem("not valid JSON: ',' or '}' is expected")
        end
        if sign == "}" then
            return setmetatable(object, { keys = keys }), place
        end
    end
end

local function json_list(text, place, depth)
    local list = { n = 0 }
    setmetatable(list, { list = true })
    place = text:match("^%s*()", place)
    if text:sub(place, place) == "]" then
        return list, place + 1
    end
    while true do
        list.n = list.n + 1
        list[list.n], place = json_value(text, place, depth)
        local sign
        sign, place = text:match("^%s*([,%]])()", place)
        if not sign then
            problem("not valid JSON: ',' or ']' is expected")
        end
        if sign == "]" then
            return list, place
        end
    end
end

function json_value(text, place, depth)
    if depth > DEPTH_LIMIT then
        problem("not valid JSON: too deep")
    end
    place = text:match("^%s*()", place)
    local sign = text:sub(place, place)
    if sign == "{" then
        return json_object(text, place + 1, depth + 1)
    elseif sign == "[" then
        return json_list(text, place + 1, depth + 1)
    elseif sign == '"' then
        return json_string(text, place + 1)
    end
    for word, value in pairs({ ["true"] = true, ["false"] = false, ["null"] = NULL }) do
        if text:sub(place, place + #word - 1) == word then
            return value, place + #word
        end
    end
    local number = text:match("^%-?%d+%.?%d*[eE]?[%+%-]?%d*", place)
    if not number then
        problem("not valid JSON: a value is expected")
    end
    return setmetatable({ text = number }, Number), place + #number
end

local function is_object(value)
    if type(value) ~= "table" or value == NULL then
        return false
    end
    local meta = getmetatable(value)
    return meta ~= Number and not (meta and meta.list)
end

local function keys_of(object)
    local meta = getmetatable(object)
    return meta and meta.keys or {}
end

-- Values

local function shown(value)
    if type(value) == "table" then
        return value.text or "something else"
    end
    return quoted(value)
end

local readers = {}

function readers.recovery(wishes, value)
    if type(value) ~= "string" or not has(MODES, value) then
        local meant = type(value) == "string" and closest(value, MODES, 0.6)
        problem("recovery=%s is not known; %s", shown(value), meant
            and "did you mean " .. quoted(meant) .. "?" or "known: " .. table.concat(MODES, ", "))
    end
    wishes.mode = value
end

function readers.max_restarts(wishes, value)
    local text = getmetatable(value) == Number and value.text or value
    local whole = type(text) == "string" and #text <= 6 and text:match("^%d+$")
    if not whole or tonumber(whole) > RESTARTS_LIMIT then
        problem("max_restarts must be a whole number from 0 to %d, not %s", RESTARTS_LIMIT,
            shown(value))
    end
end

function readers.noncritical(wishes, value)
    local words = { "1", "true", "yes", "0", "false", "no" }
    if type(value) ~= "boolean" and not (type(value) == "string" and has(words, value:lower())) then
        problem("noncritical must be true or false, not %s", shown(value))
    end
end

local function path(key, value)
    if type(value) ~= "string" or value == "" then
        problem("%s must be a path, not %s", key, shown(value))
    elseif #value > PATH_LIMIT then
        problem("%s is longer than %d characters", key, PATH_LIMIT)
    elseif value:find("%c") then
        problem("%s holds a control character", key)
    end
end

function readers.checkpoint(wishes, value)
    path("checkpoint", value)
end

function readers.progress(wishes, value)
    path("progress", value)
end

function readers.logs(wishes, value)
    local meta = type(value) == "table" and getmetatable(value)
    local list = meta and meta.list and value or { value, n = 1 }
    if list.n > LOGS_LIMIT then
        problem("logs has more than %d entries", LOGS_LIMIT)
    end
    for number = 1, list.n do
        path("logs", list[number])
    end
end

-- The three forms

local function fill(values, problems)
    local wishes = { mode = "off", problems = problems }
    for _, key in ipairs(KEYS) do
        if values[key] ~= nil then
            local well, told = pcall(readers[key], wishes, values[key])
            if not well then
                if type(told) ~= "table" then
                    error(told, 0)
                end
                problems[#problems + 1] = told.problem
            end
        end
    end
    return wishes
end

-- One "key=value" of a list at ``place``: key, value and the place behind it, or nothing.
local function item(text, place)
    local key, start = text:match("^%s*([^%s=,\"']+)%s*=%s*()", place)
    if not key then
        return nil
    end
    for _, form in ipairs({ '^"([^"]*)"%s*()', "^'([^']*)'%s*()", "^([^,\"']*)()" }) do
        local value, after = text:match(form, start)
        if value and (after > #text or text:sub(after, after) == ",") then
            return key, value, after + 1
        end
    end
    return nil
end

local function from_list(text)
    local values, foreign, broken, place = {}, {}, nil, 1
    while place <= #text do
        local key, value, after = item(text, place)
        if not key then
            local comma = text:find(",", place, true) or #text + 1
            local word = strip(text:sub(place, comma - 1))
            local name = word:match("^[^=]*")
            if near(name, KEYS) or word == "recovery" then
                broken = broken or word
            end
            after = comma + 1
        elseif not has(KEYS, key) then
            foreign[#foreign + 1] = key
        elseif key == "logs" then
            values.logs = values.logs or setmetatable({ n = 0 }, { list = true })
            values.logs.n = values.logs.n + 1
            values.logs[values.logs.n] = strip(value)
        elseif values[key] ~= nil then
            problem("%s is there twice", quoted(key))
        else
            values[key] = strip(value)
        end
        place = after
    end
    local problems = {}
    if values.recovery == nil then
        for _, key in ipairs(foreign) do
            if near(key, { "recovery" }) then
                problem("unknown key %s; did you mean 'recovery'?", quoted(key))
            end
        end
        if broken and broken:sub(1, 8) == "recovery" then
            problem("cannot read %s; write key=value, key=value", quoted(broken))
        end
        return { mode = "off", problems = problems }
    end
    for _, key in ipairs(foreign) do
        if near(key, KEYS) then
            problems[#problems + 1] = unknown(key, KEYS)
        end
    end
    if broken then
        problems[#problems + 1] = "cannot read " .. quoted(broken) .. "; write key=value, key=value"
    end
    return fill(values, problems)
end

local function from_aps(wishes)
    if not is_object(wishes) then
        problem('"APS" must be an object such as {"auto_resume_mode": "requeue"}')
    end
    local problems = {}
    for _, key in ipairs(keys_of(wishes)) do
        if not has(APS_KEYS, key) and near(key, APS_KEYS) then
            problems[#problems + 1] = unknown(key, APS_KEYS)
        end
    end
    local mode = wishes.auto_resume_mode
    if (mode == nil or mode == NULL) and #problems == 0 then
        problem("'auto_resume_mode' is missing")
    elseif mode == "singleton_dependency" then
        problem("auto_resume_mode 'singleton_dependency' is not supported; use 'requeue'")
    end
    if mode == nil or mode == NULL then
        mode = "requeue"
    end
    return fill({ recovery = mode, max_restarts = wishes.max_requeue_times }, problems)
end

local function from_wishes(wishes)
    if type(wishes) == "string" then
        return fill({ recovery = wishes }, {})
    elseif not is_object(wishes) then
        problem('"recovery" must be an object such as {"mode": "requeue"}')
    end
    local known, problems, values = { "mode" }, {}, { recovery = "requeue" }
    for _, key in ipairs(KEYS) do
        known[#known + 1] = key
    end
    for _, key in ipairs(keys_of(wishes)) do
        if not has(known, key) then
            problems[#problems + 1] = unknown(key, known)
        end
        values[key] = wishes[key]
    end
    if wishes.mode ~= nil then
        if wishes.recovery ~= nil then
            problem("'mode' and 'recovery' say the same; write one of them")
        end
        values.recovery = wishes.mode
    end
    return fill(values, problems)
end

local function from_json(text)
    local ours = text:find("recovery", 1, true) or (" " .. text .. " "):find("[^%w_]APS[^%w_]")
    local well, document, after = pcall(json_value, text, 1, 0)
    if well and text:find("%S", after) then
        well, document = false, { problem = "not valid JSON: something follows it" }
    end
    if not well then
        if type(document) ~= "table" then
            error(document, 0)
        elseif ours then
            problem("%s", document.problem)
        end
        return { mode = "off", problems = {} }
    end
    if document.recovery ~= nil then
        return from_wishes(document.recovery)
    elseif document.APS ~= nil then
        return from_aps(document.APS)
    end
    for _, key in ipairs(keys_of(document)) do
        if near(key, { "recovery" }) or key:upper() == "APS" then
            problem("%s", unknown(key, { "recovery", "APS" }))
        end
    end
    return { mode = "off", problems = {} }
end

--- Return {mode = "requeue", "hold" or "off", problems = {sentences for the owner}}.
-- As for the hooks, a mistake never opts in: whoever finds problems treats the mode as off.
function optin.parse(comment)
    local text = strip(comment or "")
    if #text >= 2 and text:sub(1, 1) == text:sub(-1) and text:find("^[\"']") then
        text = strip(text:sub(2, -2))
    end
    if #text >= TEXT_LIMIT then
        local ours = text:find("recovery", 1, true) or text:find("APS", 1, true)
        local told = "a comment of " .. TEXT_LIMIT .. " characters or more is not read"
        return { mode = "off", problems = ours and { told } or {} }
    end
    local well, wishes = pcall(text:sub(1, 1) == "{" and from_json or from_list, text)
    if well then
        return wishes
    elseif type(wishes) ~= "table" then
        error(wishes, 0)
    end
    return { mode = "off", problems = { wishes.problem } }
end

return optin
