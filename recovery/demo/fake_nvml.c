/*
 * A libnvidia-ml.so.1 for machines without GPUs: it answers NVML's calls from a JSON file.
 *
 * FAKE_NVML_STATE names the file, which is read again whenever it has changed, so that a fault can
 * be put on a GPU under a running program. Its keys are described in fake_nvml.py. Without the file
 * the driver counts as not loaded. Healthy by default is what an HGX H100 says; what a device of the
 * given architecture does not have, and the state does not name, is NVML_ERROR_NOT_SUPPORTED.
 *
 * This part: the library, and which devices there are. fake_nvml_values.c: what a device says.
 * Signatures, structures and codes: NVIDIA's nvml.h as the nvidia-ml-py package binds it (13.x).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_nvml.h"

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    return initialize(__func__);
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return shut_down(); }

const char *nvmlErrorString(int code) {
    switch (code) { /* as nvidia-smi prints them */
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires reset";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

static int copy(char *out, uint size, const char *from) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, from);
    return SUCCESS;
}

#define SYSTEM_TEXT(function, key, otherwise)                              \
    int function(char *out, uint size) {                                   \
        int code = enter(__func__);                                  \
        return leave(code ? code : copy(out, size, text(NULL, key, otherwise))); \
    }
SYSTEM_TEXT(nvmlSystemGetDriverVersion, "driver_version", "570.133.20")
SYSTEM_TEXT(nvmlSystemGetNVMLVersion, "nvml_version", "12.570.133.20")

/* ---- Which devices there are ---- */

/* Minor numbers in the order of NVML's index (by PCI address), without those marked absent. */
static uint enumerate(uint *minors) {
    uint count = (uint)number(NULL, "count", 8), found = 0;
    const Json *order = setting(NULL, "minor_order");
    order = order && order->kind == JSON_LIST ? order->child : NULL;
    for (uint index = 0; index < count && index < MAX_GPUS; ++index) {
        uint minor = order ? (uint)order->number : index;
        if (order) order = order->next;
        if (minor < MAX_GPUS && !number(&devices[minor], "absent", 0)) minors[found++] = minor;
    }
    return found;
}

int nvmlDeviceGetCount_v2(uint *count) {
    uint minors[MAX_GPUS];
    int code = enter(__func__);
    if (!code) *count = enumerate(minors);
    return leave(code);
}

static void pci_address(const Device *device, uint *domain, uint *bus, uint *slot) {
    *domain = device->minor / 16;
    *bus = 0x0b + 0x10 * (device->minor % 16);
    *slot = 0;
    sscanf(text(device, "pci", ""), "%x:%x:%x", domain, bus, slot);
}

static void uuid(const Device *device, char *out, size_t size) {
    uint node = 2166136261u; /* FNV-1a of the state's path, so that two nodes' GPUs differ */
    for (const char *at = getenv("FAKE_NVML_STATE"); at && *at; ++at) node = (node ^ (unsigned char)*at) * 16777619u;
    snprintf(out, size, "GPU-%08x-0000-4000-8000-%012x", node, device->minor);
    const char *given = text(device, "uuid", NULL);
    if (given) snprintf(out, size, "%s", given);
}

/* Hand out `found` unless its condition forbids it; releases the lock. */
static int handle(const char *function, Device *found, Device **out) {
    int code = found ? check_device(function, found) : NOT_FOUND;
    if (!code) *out = found;
    return leave(code);
}

int nvmlDeviceGetHandleByIndex_v2(uint index, Device **out) {
    uint minors[MAX_GPUS];
    int code = enter(__func__);
    if (code) return leave(code);
    if (index >= enumerate(minors)) return leave(INVALID_ARGUMENT);
    return handle(__func__, &devices[minors[index]], out);
}

int nvmlDeviceGetHandleByUUID(const char *wanted, Device **out) {
    uint minors[MAX_GPUS];
    Device *found = NULL;
    int code = enter(__func__);
    if (code) return leave(code);
    for (uint left = enumerate(minors); left-- > 0;) {
        char own[96];
        uuid(&devices[minors[left]], own, sizeof own);
        if (!strcmp(own, wanted)) found = &devices[minors[left]];
    }
    return handle(__func__, found, out);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, Device **out) {
    uint minors[MAX_GPUS], want[3] = {0}, own[3];
    Device *found = NULL;
    int code = enter(__func__);
    if (code) return leave(code);
    sscanf(wanted, "%x:%x:%x", &want[0], &want[1], &want[2]);
    for (uint left = enumerate(minors); left-- > 0;) {
        pci_address(&devices[minors[left]], &own[0], &own[1], &own[2]);
        if (!memcmp(own, want, sizeof own)) found = &devices[minors[left]];
    }
    return handle(__func__, found, out);
}

int nvmlDeviceGetMinorNumber(Device *device, uint *minor) {
    int code = enter_device(__func__, device);
    if (!code) *minor = device->minor;
    return leave(code);
}

int nvmlDeviceGetIndex(Device *device, uint *index) {
    uint minors[MAX_GPUS];
    int code = enter_device(__func__, device);
    for (uint left = code ? 0 : enumerate(minors); left-- > 0;)
        if (minors[left] == device->minor) *index = left;
    return leave(code);
}

int nvmlDeviceGetUUID(Device *device, char *out, uint size) {
    char own[96];
    int code = enter_device(__func__, device);
    if (!code) uuid(device, own, sizeof own);
    return leave(code ? code : copy(out, size, own));
}

int nvmlDeviceGetName(Device *device, char *out, uint size) {
    int code = enter_device(__func__, device);
    return leave(code ? code : copy(out, size, text(device, "name", "NVIDIA H100 80GB HBM3")));
}

typedef struct {
    char busIdLegacy[16];
    uint domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) {
    int code = enter_device(__func__, device);
    if (code) return leave(code);
    memset(out, 0, sizeof *out);
    pci_address(device, &out->domain, &out->bus, &out->device);
    out->pciDeviceId = 0x233010de; /* GH100, H100 SXM5 80GB */
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", out->domain & 0xffff,
             out->bus & 0xff, out->device & 0xff);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
    return leave(SUCCESS);
}
