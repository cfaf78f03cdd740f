/* SPDX-License-Identifier: Apache-2.0
 *
 * What read(2) does by itself and poll(2) does not. */
#ifndef TAPVERBS_PRIVATE_RESTART_H
#define TAPVERBS_PRIVATE_RESTART_H

#include <signal.h>
#include <stdbool.h>

/* tv_restarted says whether no handler of the program's has a blocking read(2) end with
 * EINTR: then no call of ours that stands for one does, whichever signal came. See
 * signal(7), SA_RESTART. */
static inline bool tv_restarted(void)
{
	struct sigaction sa;

	for (int sig = 1; sig <= SIGRTMAX; sig++)
		if (!sigaction(sig, NULL, &sa) && sa.sa_handler != SIG_DFL && sa.sa_handler != SIG_IGN && !(sa.sa_flags & SA_RESTART))
			return false;
	return true;
}

#endif
