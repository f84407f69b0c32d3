/* Cards as SOFT_GPU_* variables stage them (README.md), which are read when they are needed, as a
   command may be forked from a process that has others. */
#pragma once
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CARDS = 16 };

static inline double refuse_staged(const char *variable, const char *fix) {
  fprintf(stderr, "soft GPUs: %s=%s: use %s\n", variable, getenv(variable), fix);
  exit(2);
}
static inline double staged(const char *variable, double otherwise) {
  const char *text = getenv(variable);
  char *end = NULL;
  const double number = text && *text ? strtod(text, &end) : otherwise;
  return end && *end ? refuse_staged(variable, "a number") : number;
}
static inline int num_cards(void) { /* without the variable there are none */
  const double count = staged("SOFT_GPU_COUNT", 0);
  const bool is_one = count >= 0 && count <= MAX_CARDS;
  return (int)(is_one ? count : refuse_staged("SOFT_GPU_COUNT", "0 to 16"));
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
