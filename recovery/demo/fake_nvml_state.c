/* The state file: read again when it has changed, and asked by node, GPU and key. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake_nvml.h"

enum { MAX_FILE_BYTES = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held from enter() to leave() */
static Json *state;
static struct stat state_file;
static int state_code = DRIVER_NOT_LOADED; /* what every call answers while there is no state */
static int initialized;
Device devices[MAX_GPUS];

static void reload(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now) || !S_ISREG(now.st_mode)) {
        json_free(state);
        state = NULL;
        state_code = DRIVER_NOT_LOADED;
        return;
    }
    if (state && now.st_ino == state_file.st_ino && now.st_size == state_file.st_size &&
        !memcmp(&now.st_mtim, &state_file.st_mtim, sizeof now.st_mtim))
        return;
    state_file = now;
    size_t size = now.st_size < MAX_FILE_BYTES ? (size_t)now.st_size : MAX_FILE_BYTES, have = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    char *text = malloc(size + 1);
    ssize_t more = 1;
    while (text && file >= 0 && have < size && (more = read(file, text + have, size - have)) > 0) have += more;
    if (file >= 0) close(file);
    json_free(state);
    state = NULL;
    if (text) {
        const char *at = text;
        text[have] = '\0';
        state = json_value(&at, 0);
    }
    state_code = state ? SUCCESS : UNKNOWN;
    free(text);
}

const Json *setting(const Device *device, const char *key) {
    if (!device) return member(state, key);
    const Json *own = member(numbered(member(state, "gpus"), device->minor), key);
    return own ? own : member(member(state, "every"), key);
}

double number(const Device *device, const char *key, double otherwise) {
    const Json *node = setting(device, key);
    return node && node->kind == JSON_NUMBER ? node->number : otherwise;
}

const char *text(const Device *device, const char *key, const char *otherwise) {
    const Json *node = setting(device, key);
    return node && node->kind == JSON_TEXT ? node->text : otherwise;
}

int lists(const Device *device, const char *key, double wanted) {
    const Json *node = setting(device, key);
    for (node = node && node->kind == JSON_LIST ? node->child : NULL; node; node = node->next)
        if (node->kind == JSON_NUMBER && node->number == wanted) return 1;
    return 0;
}

int arch(const Device *device) { return (int)number(device, "arch", HOPPER); }
uint links(const Device *device) {
    return (uint)number(device, "nvlinks", arch(device) >= HOPPER ? 18 : 12);
}

/* Does `wanted` name this function? Its version (_v2, WithFlags) may be left out. */
static int names(const char *wanted, const char *function) {
    size_t length = strlen(wanted);
    if (strncmp(wanted, function, length)) return 0;
    const char *rest = function + length;
    return !*rest || !strncmp(rest, "_v", 2) || !strcmp(rest, "WithFlags");
}

static int configured_error(const Json *errors, const char *function) {
    for (errors = errors && errors->kind == JSON_TABLE ? errors->child : NULL; errors; errors = errors->next)
        if (names(errors->key, function)) return (int)errors->number;
    return SUCCESS;
}

static int unsupported(const Device *device, const char *function) {
    const Json *node = setting(device, "not_supported");
    for (node = node && node->kind == JSON_LIST ? node->child : NULL; node; node = node->next)
        if (node->kind == JSON_TEXT && names(node->text, function)) return 1;
    return 0;
}

static void note_call(const char *function, const Device *device) {
    const char *path = text(NULL, "log", NULL);
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
    if (file < 0) return;
    dprintf(file, "%s %u\n", function, device->minor);
    close(file);
}

static void misbehave(const char *function, const Device *device) {
    const char *usual = device ? "nvmlDeviceGetHandleByIndex" : "nvmlInit";
    if (number(device, "crash", 0) && names(text(device, "crash_in", usual), function)) raise(SIGSEGV);
    double seconds = number(device, "hang_seconds", 0);
    if (seconds <= 0 || !names(text(device, "hang_in", usual), function)) return;
    struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) && errno == EINTR) continue;
}

/* What the driver answers for a GPU in this condition, whatever is asked. */
static int condition(const Device *device) {
    if (number(device, "lost", 0)) return GPU_IS_LOST;
    if (number(device, "reset_required", 0)) return RESET_REQUIRED;
    return (int)number(device, "error", SUCCESS);
}

int check_device(const char *function, const Device *device) {
    int code;
    if (device < devices || device >= devices + MAX_GPUS) return INVALID_ARGUMENT;
    note_call(function, device);
    misbehave(function, device);
    if ((code = condition(device))) return code;
    if ((code = configured_error(setting(device, "errors"), function))) return code;
    return unsupported(device, function) ? NOT_SUPPORTED : SUCCESS;
}

/* Take the lock and say whether `function` may answer; leave() must follow. */
int enter(const char *function) {
    pthread_mutex_lock(&lock);
    reload();
    if (!state) return state_code;
    misbehave(function, NULL);
    if (!initialized) return UNINITIALIZED;
    return configured_error(setting(NULL, "errors"), function);
}

int enter_device(const char *function, const Device *device) {
    int code = enter(function);
    return code ? code : check_device(function, device);
}

int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

double value_since(const Device *device, const char *key, int since, double otherwise, int *found) {
    const Json *node = setting(device, key);
    *found = node ? node->kind == JSON_NUMBER : arch(device) >= since;
    return number(device, key, otherwise);
}

int initialize(const char *function) {
    pthread_mutex_lock(&lock);
    reload();
    if (!state) return leave(state_code);
    misbehave(function, NULL);
    if (number(NULL, "driver_not_loaded", 0)) return leave(DRIVER_NOT_LOADED);
    if (number(NULL, "driver_mismatch", 0)) return leave(LIB_RM_VERSION_MISMATCH);
    int code = configured_error(setting(NULL, "errors"), function);
    for (uint minor = 0; minor < MAX_GPUS; ++minor) devices[minor].minor = minor;
    if (!code) ++initialized;
    return leave(code);
}

int shut_down(void) {
    pthread_mutex_lock(&lock);
    int code = initialized ? SUCCESS : UNINITIALIZED;
    if (initialized) --initialized;
    return leave(code);
}
