/* Cards as SOFT_GPU_* variables stage them (README.md), which are read when they are needed, as a
   command may be forked from a process that has others. */
#pragma once
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CARDS = 16 };

static inline double staged(const char *variable, double otherwise) {
  const char *text = getenv(variable);
  return text && *text ? strtod(text, NULL) : otherwise;
}
static inline int num_cards(void) { /* without the variable there are none */
  double count = staged("SOFT_GPU_COUNT", 0);
  if (count >= 0 && count <= MAX_CARDS) return (int)count;
  fprintf(stderr, "soft GPUs: SOFT_GPU_COUNT=%g: use 0 to %d\n", count, MAX_CARDS);
  exit(2);
}
static inline bool is_listed(const char *variable, int card) { /* as in SOFT_GPU_DEAD=1,3 */
  for (const char *text = getenv(variable); text && *text; text = strchr(text, ',')) {
    text += *text == ',';
    if (*text && atoi(text) == card) return true;
  }
  return false;
}
static inline void write_uuid(int card, char *text, size_t size) {
  snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", card + 1);
}

/* A function of which the first arguments say all. Headers of CUDA 12 and 13 declare it unlike. */
#define SAME_AS(function, name) \
  int same_as_##name(void) __asm__(#name) __attribute__((alias(#function)));
