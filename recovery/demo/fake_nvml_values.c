/* What a device of the fake NVML says of itself: numbers, counters, links, field values. */
#include <stdio.h>
#include <string.h>

#include "fake_nvml.h"

/* ---- One number each ---- */

#define DEVICE_NUMBER(function, type, key, since, otherwise)               \
    int function(Device *device, type *out) {                              \
        int found = 0, code = enter_device(__func__, device);                     \
        double answer = code ? 0 : value_since(device, key, since, otherwise, &found); \
        if (found) *out = (type)answer;                                    \
        return leave(code ? code : found ? SUCCESS : NOT_SUPPORTED);       \
    }
enum { ALWAYS = 0, ONLY_IF_NAMED = 1000 };
#define PCIE_MAX(device) number(device, "pcie_gen_max", arch(device) >= HOPPER ? 5 : 4)

DEVICE_NUMBER(nvmlDeviceGetArchitecture, uint, "arch", ALWAYS, HOPPER)
DEVICE_NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, uint, "pcie_gen", ALWAYS, PCIE_MAX(device))
DEVICE_NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, uint, "pcie_gen_max", ALWAYS, PCIE_MAX(device))
DEVICE_NUMBER(nvmlDeviceGetCurrPcieLinkWidth, uint, "pcie_width", ALWAYS, 16)
DEVICE_NUMBER(nvmlDeviceGetMaxPcieLinkWidth, uint, "pcie_width_max", ALWAYS, 16)
DEVICE_NUMBER(nvmlDeviceGetPcieReplayCounter, uint, "pcie_replay", ALWAYS, 0)
DEVICE_NUMBER(nvmlDeviceGetPersistenceMode, uint, "persistence", ALWAYS, 1)
DEVICE_NUMBER(nvmlDeviceGetPowerManagementLimit, uint, "power_limit", ALWAYS, 700000)
DEVICE_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, uint, "power_limit_default", ALWAYS, 700000)
DEVICE_NUMBER(nvmlDeviceGetEnforcedPowerLimit, uint, "power_limit_enforced", ALWAYS, number(device, "power_limit", 700000))
DEVICE_NUMBER(nvmlDeviceGetPowerUsage, uint, "power_usage", ALWAYS, number(device, "utilization", 0) ? 600000 : 75000)
DEVICE_NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, uint, "retired_pending", ONLY_IF_NAMED, 0)

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, ull *out) {
    int code = enter_device(__func__, device);
    if (code) return leave(code);
    ull reasons = number(device, "utilization", 0) ? 0 : 0x1; /* idle */
    if (number(device, "thermal", 0)) reasons = 0x8 | 0x40;
    if (number(device, "power_brake", 0)) reasons = 0x8 | 0x80;
    *out = (ull)number(device, "clocks_event_reasons", (double)reasons);
    return leave(SUCCESS);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, ull *out) {
    return nvmlDeviceGetCurrentClocksEventReasons(device, out);
}


typedef struct { uint gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    int code = enter_device(__func__, device);
    if (code) return leave(code);
    out->gpu = (uint)number(device, "utilization", 0);
    out->memory = (uint)number(device, "utilization_memory", 0);
    return leave(SUCCESS);
}

/* ---- Processes ---- */

typedef struct { uint pid; ull memory; uint instance, compute_instance; } ProcessInfo;

static int processes(const char *function, Device *device, const char *key, uint *count, ProcessInfo *out) {
    int code = enter_device(function, device);
    if (code) return leave(code);
    const Json *node = setting(device, key);
    uint room = *count, found = 0;
    for (node = node && node->kind == JSON_LIST ? node->child : NULL; node; node = node->next, ++found)
        if (out && found < room) out[found] = (ProcessInfo){(uint)node->number, 1ull << 30, ~0u, ~0u};
    *count = found;
    return leave(found > (out ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS);
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, uint *count, ProcessInfo *out) {
    return processes(__func__, device, "processes", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, uint *count, ProcessInfo *out) {
    return processes(__func__, device, "processes_graphics", count, out);
}

/* ---- Temperature ---- */

typedef struct { uint version, sensor; int celsius; } Temperature;
typedef struct { uint version; int celsius; } Margin;

int nvmlDeviceGetTemperatureV(Device *device, Temperature *out) {
    int code = enter_device(__func__, device);
    if (!code && out->version != 0x100000c) code = ARGUMENT_VERSION_MISMATCH;
    if (!code) out->celsius = (int)number(device, "temperature", 34);
    return leave(code);
}

int nvmlDeviceGetTemperature(Device *device, uint sensor, uint *celsius) {
    int code = enter_device(__func__, device);
    if (!code && sensor) code = INVALID_ARGUMENT;
    if (!code) *celsius = (uint)number(device, "temperature", 34);
    return leave(code);
}

int nvmlDeviceGetTemperatureThreshold(Device *device, uint threshold, uint *celsius) {
    static const char *const keys[] = {"temperature_shutdown", "temperature_slowdown", "temperature_mem_max",
                                       "temperature_gpu_max"};
    static const uint usual[] = {92, 89, 95, 87};
    int code = enter_device(__func__, device);
    if (!code && threshold > 3) code = NOT_SUPPORTED;
    if (!code) *celsius = (uint)number(device, keys[threshold], usual[threshold]);
    return leave(code);
}

int nvmlDeviceGetMarginTemperature(Device *device, Margin *out) { /* degrees left before slowdown */
    int found = 0, code = enter_device(__func__, device);
    if (!code && out->version != 0x1000008) code = ARGUMENT_VERSION_MISMATCH;
    double usual = code ? 0 : number(device, "temperature_gpu_max", 87) - number(device, "temperature", 34);
    double margin = code ? 0 : value_since(device, "temperature_margin", HOPPER, usual, &found);
    if (found) out->celsius = (int)margin;
    return leave(code ? code : found ? SUCCESS : NOT_SUPPORTED);
}

/* ---- Memory errors ---- */

static double ecc_count(const Device *device, int uncorrected, int aggregate, int sram) {
    char key[64];
    snprintf(key, sizeof key, "%s_%s%s", sram ? "sram" : "ecc", uncorrected ? "uncorrectable" : "correctable",
             aggregate ? "_aggregate" : "");
    return number(device, key, 0);
}

static int ecc_on(const Device *device) { return number(device, "ecc_mode", 1) != 0; }

/* The state's ecc_* are what DRAM counted and sram_* what SRAM did; the total is both. */
int nvmlDeviceGetTotalEccErrors(Device *device, uint uncorrected, uint aggregate, ull *out) {
    int code = enter_device(__func__, device);
    if (!code && !ecc_on(device)) code = NOT_SUPPORTED;
    if (!code) *out = (ull)(ecc_count(device, uncorrected, aggregate, 0) + ecc_count(device, uncorrected, aggregate, 1));
    return leave(code);
}

int nvmlDeviceGetMemoryErrorCounter(Device *device, uint uncorrected, uint aggregate, uint location, ull *out) {
    enum { DRAM = 2, SRAM = 7 };
    int code = enter_device(__func__, device);
    if (!code && (!ecc_on(device) || (location != DRAM && location != SRAM))) code = NOT_SUPPORTED;
    if (!code) *out = (ull)ecc_count(device, uncorrected, aggregate, location == SRAM);
    return leave(code);
}

typedef struct {
    uint version;
    ull aggregateUncParity, aggregateUncSecDed, aggregateCor, volatileUncParity, volatileUncSecDed, volatileCor;
    ull aggregateUncBucketL2, aggregateUncBucketSm, aggregateUncBucketPcie, aggregateUncBucketMcu, aggregateUncBucketOther;
    uint bThresholdExceeded;
} SramStatus;

int nvmlDeviceGetSramEccErrorStatus(Device *device, SramStatus *out) {
    int code = enter_device(__func__, device);
    if (!code && (arch(device) < AMPERE || !ecc_on(device))) code = NOT_SUPPORTED;
    if (!code && out->version != 0x1000068) code = ARGUMENT_VERSION_MISMATCH;
    if (code) return leave(code);
    memset(out, 0, sizeof *out);
    out->version = 0x1000068;
    out->aggregateUncSecDed = out->aggregateUncBucketSm = (ull)ecc_count(device, 1, 1, 1);
    out->volatileUncSecDed = (ull)ecc_count(device, 1, 0, 1);
    out->aggregateCor = (ull)ecc_count(device, 0, 1, 1);
    out->volatileCor = (ull)ecc_count(device, 0, 0, 1);
    out->bThresholdExceeded = (uint)number(device, "sram_threshold_exceeded", 0);
    return leave(SUCCESS);
}

int nvmlDeviceGetEccMode(Device *device, uint *current, uint *pending) {
    int code = enter_device(__func__, device);
    if (code) return leave(code);
    *current = (uint)number(device, "ecc_mode", 1);
    *pending = (uint)number(device, "ecc_pending", *current);
    return leave(SUCCESS);
}

int nvmlDeviceGetRemappedRows(Device *device, uint *correctable, uint *uncorrectable, uint *pending, uint *failed) {
    int code = enter_device(__func__, device);
    if (!code && arch(device) < AMPERE) code = NOT_SUPPORTED;
    if (code) return leave(code);
    *correctable = (uint)number(device, "remap_correctable", 0);
    *uncorrectable = (uint)number(device, "remap_uncorrectable", 0);
    *pending = (uint)number(device, "remap_pending", 0);
    *failed = (uint)number(device, "remap_failed", 0);
    return leave(SUCCESS);
}

typedef struct { uint max, high, partial, low, none; } RemapHistogram;

int nvmlDeviceGetRowRemapperHistogram(Device *device, RemapHistogram *out) {
    int code = enter_device(__func__, device);
    if (!code && arch(device) < AMPERE) code = NOT_SUPPORTED;
    if (code) return leave(code);
    memset(out, 0, sizeof *out);
    out->none = (uint)number(device, "remap_banks_without_spare", 0);
    out->max = 2560 - out->none;
    return leave(SUCCESS);
}

int nvmlDeviceGetRetiredPages(Device *device, uint cause, uint *count, ull *addresses) {
    int found = 0, code = enter_device(__func__, device);
    uint have = code ? 0 : (uint)value_since(device, cause ? "retired_dbe" : "retired_sbe", ONLY_IF_NAMED, 0, &found);
    if (!code && !found) code = NOT_SUPPORTED;
    if (code) return leave(code);
    if (*count < have || (have && !addresses)) code = INSUFFICIENT_SIZE;
    for (uint page = 0; !code && page < have; ++page) addresses[page] = 0x10000ull * (page + 1);
    *count = have;
    return leave(code);
}

/* ---- MIG, links, fabric ---- */

int nvmlDeviceGetMigMode(Device *device, uint *current, uint *pending) {
    int code = enter_device(__func__, device);
    if (!code && arch(device) < AMPERE) code = NOT_SUPPORTED;
    if (code) return leave(code);
    *current = (uint)number(device, "mig_mode", 0);
    *pending = (uint)number(device, "mig_pending", *current);
    return leave(SUCCESS);
}

int nvmlDeviceGetNvLinkState(Device *device, uint link, uint *active) {
    int code = enter_device(__func__, device);
    if (!code && !links(device)) code = NOT_SUPPORTED;
    if (!code && link >= links(device)) code = INVALID_ARGUMENT;
    if (!code) *active = !lists(device, "nvlink_down", link);
    return leave(code);
}

typedef struct {
    uint version;
    unsigned char clusterUuid[16];
    uint status, cliqueId;
    uint state; /* unsigned char and padding in nvml.h */
    uint healthMask;
    unsigned char healthSummary; /* from version 3 on */
} FabricInfo;

int nvmlDeviceGetGpuFabricInfoV(Device *device, FabricInfo *out) {
    int found = 0, code = enter_device(__func__, device);
    double fabric = code ? 0 : value_since(device, "fabric_state", HOPPER, 3, &found);
    if (!code && !found) code = NOT_SUPPORTED;
    uint version = code ? 0 : out->version;
    if (!code && version != 0x2000024 && version != 0x3000028) code = ARGUMENT_VERSION_MISMATCH;
    if (code) return leave(code);
    memset(out->clusterUuid, 0, sizeof out->clusterUuid);
    out->status = (uint)number(device, "fabric_status", SUCCESS);
    out->cliqueId = 0;
    out->state = (uint)fabric;
    out->healthMask = (uint)number(device, "fabric_health_mask", 0xaa); /* each of four: "no" */
    if (version == 0x3000028) out->healthSummary = (unsigned char)number(device, "fabric_health_summary", 0);
    return leave(SUCCESS);
}

/* ---- Field values ---- */

typedef struct {
    uint fieldId, scopeId;
    long long timestamp, latencyUsec;
    uint valueType;
    int nvmlReturn;
    union { double dVal; uint uiVal; ull ullVal; } value;
} FieldValue;

/* An error counter of one link: nvlink_errors = {"4": {"replay": 12}}. */
static double link_errors(const Device *device, uint link, const char *kind) {
    const Json *node = member(numbered(setting(device, "nvlink_errors"), link), kind);
    return node ? node->number : 0;
}

/* Answer one field from what the state says of its subject; *known is 0 where the device has none. */
static double field(const Device *device, uint id, uint link, int *known) {
    static const char *const classic[] = {"replay", "recovery", "crc"};
    static const char *const fifth[] = { /* fields 206-215 */
        "malformed_packet", "buffer_overrun", "rcv", "rcv_remote", "rcv_general", "local_link_integrity",
        "xmit_discard", "recovery_successful", "recovery_failed", "recovery"};
    static const char *const pcie[] = { /* fields 173-183 */
        "correctable", "naks_received", "receiver", "bad_tlp", "naks_sent", "bad_dllp", "non_fatal", "fatal",
        "unsupported_req", "lcrc", "lane"};
    const Json *given = numbered(setting(device, "fields"), id);
    if (given && given->kind == JSON_TABLE) given = numbered(given, link);
    *known = 1;
    if (given) return given->number;
    if (id == 91) return links(device);
    if (id >= 161 && id <= 163 && link < links(device) && arch(device) < BLACKWELL)
        return link_errors(device, link, classic[id - 161]);
    if (id == 165 && link < links(device)) return !lists(device, "nvlink_down", link);
    if (id >= 206 && id <= 215 && link < links(device) && arch(device) >= BLACKWELL)
        return link_errors(device, link, fifth[id - 206]);
    if (id >= 173 && id <= 183 && arch(device) >= HOPPER) {
        const Json *node = member(setting(device, "pcie_errors"), pcie[id - 173]);
        return node ? node->number : 0;
    }
    if ((id == 193 || id == 194) && arch(device) >= HOPPER) return id == 193 ? -3 : -2; /* below slowdown */
    if (id == 230 && arch(device) >= AMPERE) return number(device, "recovery_action", 0);
    *known = 0;
    return 0;
}

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    int code = enter_device(__func__, device);
    if (code) return leave(code);
    const Json *missing = setting(device, "fields_not_supported");
    for (int at = 0; at < count; ++at) {
        int known;
        double answer = field(device, values[at].fieldId, values[at].scopeId, &known);
        if (missing && lists(device, "fields_not_supported", values[at].fieldId)) known = 0;
        values[at].nvmlReturn = known ? SUCCESS : NOT_SUPPORTED;
        values[at].timestamp = values[at].latencyUsec = 0;
        values[at].valueType = answer < 0 ? 5 : 3; /* signed int, unsigned long long */
        values[at].value.ullVal = answer < 0 ? (uint)(int)answer : (ull)answer;
    }
    return leave(SUCCESS);
}
