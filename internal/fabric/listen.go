// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"fmt"
	"os"
	"strings"
)

// Listens says whether somebody listens at a TCP port, of IPv4 or IPv6, of a process's
// network namespace; process 0 is this one. Connecting would tell as well, but a server that
// serves one would take that for its client. A process that has ended has no listeners.
func Listens(process, port int) bool {
	who, end := "self", fmt.Sprintf(":%04X", port)
	if process != 0 {
		who = fmt.Sprint(process)
	}
	for _, f := range []string{"tcp", "tcp6"} {
		b, err := os.ReadFile("/proc/" + who + "/net/" + f)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(b)) {
			// The local address is the second word, the state the fourth (proc(5)): 0A listens.
			if w := strings.Fields(line); len(w) > 3 && w[3] == "0A" && strings.HasSuffix(w[1], end) {
				return true
			}
		}
	}
	return false
}
