/* What the parts of the fake NVML share: its codes, its devices, and how the state is asked. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

typedef unsigned int uint;
typedef unsigned long long ull;

enum { /* nvmlReturn_t */
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, RESET_REQUIRED = 16,
    LIB_RM_VERSION_MISMATCH = 18, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};
enum { AMPERE = 7, ADA = 8, HOPPER = 9, BLACKWELL = 10 }; /* nvmlDeviceArchitecture_t */
enum { MAX_GPUS = 64 };

typedef struct { uint minor; } Device; /* what a caller's nvmlDevice_t points to */

typedef struct Json {
    enum { JSON_NULL, JSON_NUMBER, JSON_TEXT, JSON_LIST, JSON_TABLE } kind; /* true is 1, false 0 */
    char *key, *text;
    double number;
    struct Json *child, *next;
} Json;

#pragma GCC visibility push(hidden)

extern Device devices[MAX_GPUS]; /* by minor number */

/* Start and end of every call. enter() takes a lock and says by its code whether `function` may
 * answer; leave() must follow, and returns the code it is given. */
int enter(const char *function);
int enter_device(const char *function, const Device *device);
int check_device(const char *function, const Device *device); /* between the two */
int leave(int code);
int initialize(const char *function);
int shut_down(void);

/* A setting of one GPU (its own, else that of "every"), or with device NULL of the whole node. */
const Json *setting(const Device *device, const char *key);
double number(const Device *device, const char *key, double otherwise);
const char *text(const Device *device, const char *key, const char *otherwise);
int lists(const Device *device, const char *key, double wanted);
/* The number, with *found telling whether the state names it or the architecture has it. */
double value_since(const Device *device, const char *key, int since, double otherwise, int *found);
int arch(const Device *device);
uint links(const Device *device);

const Json *member(const Json *table, const char *key);
const Json *numbered(const Json *table, uint number); /* the member whose key is that number */
Json *json_value(const char **at, int depth); /* NULL where the text is no JSON */
void json_free(Json *node);

#pragma GCC visibility pop

#endif
