/* SPDX-License-Identifier: Apache-2.0
 *
 * Calling the functions of a C program from Go, which cannot call pointers. */
#ifndef TAPVERBS_CALL_H
#define TAPVERBS_CALL_H

#include "engine.h"

/* Which of the functions of struct tv_notifier. */
enum { TV_HOOK_RELEASE, TV_HOOK_SYNC, TV_HOOK_INVALIDATE, TV_HOOK_UPDATE, TV_HOOK_PROTECT, TV_HOOK_SYNC_PAGE,
       TV_HOOK_INVALIDATE_PAGE, TV_HOOK_UPDATE_PAGE };

void tv_call_hook(const struct tv_notifier *n, int hook, uintptr_t start, uintptr_t end, int prot);

#endif
