/* NVML: sees all cards, whatever CUDA_VISIBLE_DEVICES says, and never starts the driver.
   Where no cards are staged, or SOFT_GPU_NVML=0 (as torch for ROCm has it), it can't be used. */
#include "staged.h"
#include <stdint.h>
#include <time.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9 };
typedef void *Device; /* its number + 1 */

static int card_of(Device device) { return (int)(intptr_t)device - 1; }

int nvmlInitWithFlags(unsigned flags) {
  return staged_count() && staged_number("SOFT_GPU_NVML", 1) ? OK : DRIVER_NOT_LOADED;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = staged_count();
  return nvmlInitWithFlags(0);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
  *device = (Device)(intptr_t)(index + 1);
  return (int)index < staged_count() ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
  card_uuid(card_of(device), text, size);
  return OK;
}
int nvmlDeviceGetHandleByUUID(const char *wanted, Device *device) {
  char uuid[64];
  for (int card = 0; card < staged_count(); card++) {
    card_uuid(card, uuid, sizeof uuid);
    if (strcmp(uuid, wanted) == 0) return nvmlDeviceGetHandleByIndex_v2(card, device);
  }
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *device) {
  unsigned card = MAX_CARDS;
  sscanf(id, "%*x:%x:", &card);
  return nvmlDeviceGetHandleByIndex_v2(card, device);
}
int nvmlDeviceGetName(Device device, char *text, unsigned size) {
  snprintf(text, size, "Soft GPU");
  return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(Device device, unsigned long long *millijoules) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *millijoules = now.tv_sec * 100000ull + now.tv_nsec / 10000; /* 100 W */
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, void *processes) {
  *count = 0;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned *count, void *processes) {
  *count = 0;
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, void *type) {
  return NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, void *info) {
  return NOT_SUPPORTED;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
