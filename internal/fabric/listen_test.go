// SPDX-License-Identifier: Apache-2.0

package fabric

import (
	"net"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestListens(t *testing.T) {
	// Other tests of this package may leave the process's first thread in another namespace.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here := unix.Gettid()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if !Listens(here, port) {
		t.Errorf("nobody listens at port %d", port)
	}
	l.Close()
	if Listens(here, port) {
		t.Error("there is a listener that was closed")
	}
}
