// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// theirTests is where Debian's python3-pyverbs puts rdma-core's Python tests.
const theirTests = "/usr/share/doc/rdma-core/tests"

// unpack copies rdma-core's tests into a directory of ours. Debian compresses the
// larger files; nothing else is done to them.
func unpack(dir string) error {
	files, err := os.ReadDir(theirTests)
	if err != nil {
		return err
	}
	for _, f := range files {
		r, err := os.Open(filepath.Join(theirTests, f.Name()))
		if err != nil {
			return err
		}
		defer r.Close()
		name, gz := strings.CutSuffix(f.Name(), ".gz")
		var in io.Reader = r
		if gz {
			if in, err = gzip.NewReader(r); err != nil {
				return err
			}
		}
		b, err := io.ReadAll(in)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// vendors says whose tests are not counted: those of a vendor's own extensions.
func vendors(id string) bool {
	return strings.HasPrefix(id, "test_mlx5") || strings.HasPrefix(id, "test_efa")
}

// cmTests are those of the RDMA CM.
const cmTests = "test_rdmacm."

// TestRDMACoreCM runs them: all pass. Each is two processes, which have a device and an address
// each; see run_rdma_core.py.
func TestRDMACoreCM(t *testing.T) {
	dir := t.TempDir()
	tests := filepath.Join(dir, "tests")
	if err := errors.Join(os.Mkdir(tests, 0o755), unpack(tests)); err != nil {
		t.Fatal(err)
	}
	out := inFabric(t, []string{"NODES=" + dir}, 0, 3, "sh", "-c", `env | grep ^TAPVERBS_ > $NODES/making$TAPVERBS_RANK
mv $NODES/making$TAPVERBS_RANK $NODES/rank$TAPVERBS_RANK
[ $TAPVERBS_RANK = 0 ] || exit 0
until [ -e $NODES/rank1 ] && [ -e $NODES/rank2 ]; do sleep 0.01; done
exec /usr/bin/python3 testdata/run_rdma_core.py $NODES/tests tapverbs0 1 test_rdmacm`)
	passed := 0
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 3 || !strings.HasPrefix(f[0], "tests."+cmTests) {
			continue
		}
		if f[1] == "ok" {
			passed++
		} else {
			t.Errorf("%s: %s: %s", f[0], f[1], f[2])
		}
	}
	if passed != 10 {
		t.Errorf("%d of 10 passed:\n%s", passed, out)
	}
}

// TestRDMACore runs rdma-core's own Python tests, unpatched, and compares each result
// with RDMA-CORE.md: what is skipped or fails stands there with its reason, what is not
// there passes.
func TestRDMACore(t *testing.T) {
	dir := t.TempDir()
	if err := unpack(dir); err != nil {
		t.Fatalf("%v (Debian's package python3-pyverbs has them; .ci/deps installs it)", err)
	}
	table := rows(t, "RDMA-CORE.md")
	out := inFabric(t, nil, 0, 1, "/usr/bin/python3", "testdata/run_rdma_core.py", dir, "tapverbs0", "1")
	seen, counts := map[string]bool{}, map[string]int{}
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 3 || !strings.HasPrefix(f[0], "tests.") {
			continue
		}
		id, status, why := strings.TrimPrefix(f[0], "tests."), f[1], f[2]
		if strings.HasPrefix(id, cmTests) {
			continue // TestRDMACoreCM has them
		}
		if vendors(id) {
			if status != "skipped" && status != "ok" {
				t.Errorf("%s: %s %s, though the device is not of that vendor", id, status, why)
			}
			continue
		}
		seen[id] = true
		counts[status]++
		want := "ok"
		if c := table[id]; c != nil {
			want = c[0]
		}
		if status != want && !(want == "ok or skipped" && (status == "ok" || status == "skipped")) {
			t.Errorf("%s: %s, RDMA-CORE.md has %s: %s", id, status, want, why)
		}
	}
	for id := range table {
		if !seen[id] && strings.HasPrefix(id, "test_") { // another table says what is replaced for those of the CM
			t.Errorf("RDMA-CORE.md has %s, which did not run", id)
		}
	}
	t.Logf("of %d tests that are not for one vendor: %v", len(seen), counts)
	if t.Failed() || counts["ok"] <= 110 {
		t.Errorf("%d passed, more than 110 wanted:\n%s", counts["ok"], out)
	}
}
