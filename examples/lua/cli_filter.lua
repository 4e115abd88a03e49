--[[
The commands' side of the opt-in (CliFilterPlugins=lua; beside slurm.conf on every host on which
jobs are submitted, with recovery_optin.lua):

* a comment that speaks of recovery and has a mistake is refused before it reaches slurmctld;
* an opted-in batch job appends to its output (--open-mode=append), so that the log of the failed
  attempt is still there after the next one, and may be requeued (--requeue). What its owner has
  said, by an option or in the script, stays.

It runs as the user, who can get around it: what must hold is job_submit.lua's to check.
]]

local folder = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local optin = dofile(folder .. "recovery_optin.lua")

local function not_said(option)
    return option == nil or option == "" or option == "unset" -- differs by option, and release
end

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
    local wishes = optin.parse(options["comment"])
    for _, text in ipairs(wishes.problems) do
        slurm.log_error("recovery, in --comment: %s", text)
    end
    if #wishes.problems > 0 then
        return slurm.ERROR
    end
    if wishes.mode ~= "off" and options["type"] == "sbatch" then
        if not_said(options["open-mode"]) then
            options["open-mode"] = "append"
        end
        if wishes.mode == "requeue" and not_said(options["requeue"]) then
            options["requeue"] = "requeue"
        end
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end

return slurm.SUCCESS
