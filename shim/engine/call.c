/* SPDX-License-Identifier: Apache-2.0 */
#include "call.h"

void tv_call_hook(const struct tv_notifier *n, int hook, uintptr_t start, uintptr_t end, int prot)
{
	switch (hook) {
	case TV_HOOK_RELEASE:
		n->release(n->user);
		break;
	case TV_HOOK_SYNC:
		n->sync_range(n->user, start, end);
		break;
	case TV_HOOK_INVALIDATE:
		n->invalidate_range(n->user, start, end);
		break;
	case TV_HOOK_UPDATE:
		n->update_range(n->user, start, end);
		break;
	case TV_HOOK_PROTECT:
		n->change_protection(n->user, start, end, prot);
		break;
	case TV_HOOK_SYNC_PAGE:
		n->sync_page(n->user, start);
		break;
	case TV_HOOK_INVALIDATE_PAGE:
		n->invalidate_page(n->user, start);
		break;
	case TV_HOOK_UPDATE_PAGE:
		n->update_page(n->user, start);
		break;
	}
}
