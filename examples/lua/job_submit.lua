--[[
slurmctld's side of the opt-in (JobSubmitPlugins=lua; beside slurm.conf, with recovery_optin.lua):

* a comment that speaks of recovery and has a mistake is refused, with the right spelling, rather
  than run without the recovery that its owner counts on;
* a batch job that opts in to be requeued may be requeued, whatever JobRequeue in slurm.conf says;
* one that forbids it (--no-requeue) or is no batch job is told that it will not be run again.

Nobody gets around it, since it is slurmctld that runs it. --open-mode=append cannot be set here:
job_submit/lua has no such field (22.05 to 26.05), hence cli_filter.lua.

A site that has a job_submit.lua calls the two functions of ``recovery`` from its own.
]]

local folder = debug.getinfo(1, "S").source:match("^@(.*/)") or "/etc/slurm/"
local optin = dofile(folder .. "recovery_optin.lua")

local REQUEUE_NOT_SAID = slurm.NO_VAL16

recovery = {}

--- Return slurm.ERROR, and tell the user why, where the comment's wish cannot be understood.
function recovery.check(comment)
    local wishes = optin.parse(comment)
    for _, text in ipairs(wishes.problems) do
        slurm.log_user("recovery, in --comment: %s", text)
    end
    return #wishes.problems == 0 and slurm.SUCCESS or slurm.ERROR, wishes.mode
end

--- Let an opted-in job be requeued, or tell its owner why it cannot be.
function recovery.prepare(job_desc, mode)
    if mode ~= "requeue" then
        return
    end
    if job_desc.script == nil then
        slurm.log_user("recovery: only batch jobs (sbatch) can be run again; this one is watched")
    elseif job_desc.requeue == 0 then
        slurm.log_user("recovery: --no-requeue wins: this job is not run again")
    elseif job_desc.requeue == REQUEUE_NOT_SAID then
        job_desc.requeue = 1
    end
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    local answer, mode = recovery.check(job_desc.comment)
    if answer == slurm.SUCCESS then
        recovery.prepare(job_desc, mode)
    end
    return answer
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    -- nil unless the comment itself is being changed
    local answer = recovery.check(job_desc.comment)
    return answer
end

return slurm.SUCCESS
