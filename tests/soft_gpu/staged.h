/* Cards as SOFT_GPU_* variables stage them (README.md lists these). They are read when they are
   needed, as a command may be forked from a process that has other variables. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CARDS = 16 };

static inline double staged_number(const char *variable, double otherwise) {
  const char *text = getenv(variable);
  return text && *text ? strtod(text, NULL) : otherwise;
}

static inline int staged_count(void) { /* no variable: no cards */
  const int count = (int)staged_number("SOFT_GPU_COUNT", 0);
  return count < MAX_CARDS ? count : MAX_CARDS;
}

static inline int is_staged(const char *variable, int card) { /* as in SOFT_GPU_DEAD=1,3 */
  for (const char *text = getenv(variable); text && *text; text = strchr(text, ',')) {
    text += *text == ',';
    if (*text && atoi(text) == card) return 1;
  }
  return 0;
}

static inline size_t card_memory(void) { return (size_t)staged_number("SOFT_GPU_MEMORY", 16e9); }

static inline void card_uuid(int card, char *text, size_t size) {
  snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", card + 1);
}
