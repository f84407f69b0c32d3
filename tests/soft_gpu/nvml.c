/* NVML: sees all cards, whatever CUDA_VISIBLE_DEVICES says, and never starts the driver. Where no
   cards are staged, or SOFT_GPU_NVML=0 (as it is with AMD's cards), it can't be used. */
#include "staged.h"
#include <stdint.h>
#include <time.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };
typedef void *Device; /* the card's number, plus 1 */

int nvmlInitWithFlags(unsigned flags) {
  return num_cards() && staged("SOFT_GPU_NVML", 1) ? OK : DRIVER_NOT_LOADED;
}
SAME_AS(nvmlInitWithFlags, nvmlInit_v2)
SAME_AS(nvmlInitWithFlags, nvmlInit)
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = num_cards(); return nvmlInitWithFlags(0); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
  *device = (Device)(intptr_t)(index + 1);
  return index < (unsigned)num_cards() ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
  unsigned number = 0;
  sscanf(uuid, "GPU-%x", &number);
  return nvmlDeviceGetHandleByIndex_v2(number - 1, device);
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device *device) {
  unsigned card = MAX_CARDS;
  sscanf(id, "%*x:%x:", &card);
  return nvmlDeviceGetHandleByIndex_v2(card, device);
}
int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
  write_uuid((int)(intptr_t)device - 1, text, size);
  return OK;
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
int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned *n) { return *n = OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
SAME_AS(nvmlDeviceGetNvLinkRemoteDeviceType, nvmlDeviceGetNvLinkRemotePciInfo_v2)
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
