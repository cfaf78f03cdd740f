// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fioRun is a run of fio's rdma engine. The receiver, or whose memory it is, is fio's "read"
// job, and the server; what is done to it is the client's verb.
type fioRun struct {
	verb string
	// server and client are further lines of the two jobs.
	server, client string
}

// fio can verify with this engine in one way only: a receiver looks at what has come. Of
// engines that go one way (FIO_UNIDIR) it reads nothing back, and the server of memory verbs
// waits for the client's end, and looks at nothing.
var fioRuns = []fioRun{
	{"write", "", "verify=crc32c\n"},
	{"read", "", ""},
	{"send", "verify=crc32c\n", "verify=crc32c\n"},
}

// TestFio: fio's rdma engine. Both ends load testdata/patient.c.
func TestFio(t *testing.T) {
	for _, r := range fioRuns {
		t.Run(r.verb, func(t *testing.T) {
			out := fio(t, r)
			if n := strings.Count(out, "err= 0"); n != 2 {
				t.Errorf("%d of 2 without an error:\n%s", n, out)
			}
		})
	}
	// It would be seen if what comes were not what was sent.
	t.Run("send, of something else", func(t *testing.T) {
		out := fio(t, fioRun{"send", "verify=pattern\nverify_pattern=0xaa\ncontinue_on_error=verify\n", "verify=pattern\nverify_pattern=0xbb\n"})
		if !strings.Contains(out, "got pattern 'bb', wanted 'aa'") {
			t.Errorf("the receiver does not complain:\n%s", out)
		}
	})
}

// fio runs a server and a client with their jobs, and gives what they printed.
func fio(t *testing.T, r fioRun) string {
	t.Helper()
	dir := t.TempDir()
	job := func(name, text string) string {
		file := filepath.Join(dir, name)
		// Where fio keeps how far it has verified is the working directory: not there, please.
		text = "[job]\nioengine=rdma\nport=7174\nbs=64k\nsize=16m\nverify_state_save=0\nverb=" + r.verb + "\n" + text
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	server := job("server", "rw=read\niodepth=16\n"+r.server)
	client := job("client", "rw=write\niodepth=4\nhostname=${TAPVERBS_PEER}\n"+r.client)
	return runCM(t, []string{preloadEnv + "=" + bin("patient.so")}, "fio "+server, "fio "+client)
}
