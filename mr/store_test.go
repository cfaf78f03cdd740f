// SPDX-License-Identifier: Apache-2.0

package mr

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// slowStore is a Store that is Go code and holds each call until it is let go. For tests.
type slowStore struct {
	memStore
	gate chan struct{} // a value lets one Read or Write go; closed: all
}

func newSlowStore() *slowStore { return &slowStore{gate: make(chan struct{})} }

func (s *slowStore) Write(slot uint32, page []byte) error {
	<-s.gate
	return s.memStore.Write(slot, page)
}

func (s *slowStore) Read(slot uint32, page []byte) error {
	<-s.gate
	return s.memStore.Read(slot, page)
}

// failingStore is a Store that is Go code and fails when told. For tests.
type failingStore struct {
	memStore
	failWrites, failReads atomic.Bool
}

var errStoreTest = errors.New("the test's store fails")

func (f *failingStore) Write(slot uint32, page []byte) error {
	if f.failWrites.Load() {
		return errStoreTest
	}
	return f.memStore.Write(slot, page)
}

func (f *failingStore) Read(slot uint32, page []byte) error {
	if f.failReads.Load() {
		return errStoreTest
	}
	return f.memStore.Read(slot, page)
}

// memStore is a Store in a map, the model of what a Store is.
type memStore struct {
	mu    sync.Mutex
	pages map[uint32][]byte
}

func (m *memStore) Write(slot uint32, page []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pages == nil {
		m.pages = map[uint32][]byte{}
	}
	m.pages[slot] = bytes.Clone(page)
	return nil
}

func (m *memStore) Read(slot uint32, page []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, ok := m.pages[slot]
	if !ok {
		return os.ErrNotExist
	}
	copy(page, p)
	return nil
}

func (m *memStore) Free(slot uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.pages, slot)
}

func (m *memStore) Close() error { return nil }

// inUse is how many slots have content.
func (m *memStore) inUse() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.pages)
}

// usageStore is what the stores of this package are.
type usageStore interface {
	cStore
	Usage() StoreUsage
}

// stores makes one of each kind.
func stores(t *testing.T, f func(t *testing.T, st usageStore)) {
	for _, k := range []struct {
		name string
		make func() (Store, error)
	}{
		{"file", func() (Store, error) { return NewFileStore(t.TempDir()) }},
		{"compressed", NewCompressedStore},
	} {
		t.Run(k.name, func(t *testing.T) {
			st, err := k.make()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := st.Close(); err != nil && err != ErrClosed {
					t.Error(err)
				}
			})
			f(t, st.(usageStore))
		})
	}
}

// somePage is a page of one of the kinds that stores treat differently.
func somePage(r *rand.Rand) []byte {
	p := make([]byte, pageSize)
	fill := func(b []byte) {
		for i := range b {
			b[i] = byte(r.Uint32())
		}
	}
	switch r.IntN(6) {
	case 0: // zeros
	case 1: // one word
		fill(p[:8])
		for i := 8; i < pageSize; i += 8 {
			copy(p[i:], p[:8])
		}
	case 2: // one word, but for one byte
		fill(p[:8])
		for i := 8; i < pageSize; i += 8 {
			copy(p[i:], p[:8])
		}
		p[r.IntN(pageSize)] ^= 1
	case 3: // incompressible
		fill(p)
	default: // so much of it random
		fill(p[:r.IntN(pageSize)])
	}
	return p
}

func TestStoreGivesBackWhatItWasGiven(t *testing.T) {
	stores(t, func(t *testing.T, st usageStore) {
		r := rand.New(rand.NewPCG(1, 2))
		model := map[uint32][]byte{}
		slots := [...]uint32{0, 1, 2, 3, 4, 5, 16383, 16384, 16385, 1 << 20, 1<<28 - 1}
		got := make([]byte, pageSize)
		for range 5000 {
			slot := slots[r.IntN(len(slots))]
			switch r.IntN(4) {
			case 0:
				st.Free(slot)
				delete(model, slot)
			case 1:
				p := somePage(r)
				if err := st.Write(slot, p); err != nil {
					t.Fatal(err)
				}
				model[slot] = p
			default:
				for i := range got {
					got[i] = 0xa5
				}
				err := st.Read(slot, got)
				if want, ok := model[slot]; ok {
					if err != nil {
						t.Fatalf("read slot %d: %v", slot, err)
					}
					same(t, "a page", got, want)
				} else if !errors.Is(err, unix.ENOENT) {
					t.Fatalf("read of a slot that was not written: %v", err)
				}
			}
		}
		if u := st.Usage(); u.In != uint64(len(model))*pageSize {
			t.Errorf("%d bytes in it, want %d pages", u.In, len(model))
		}
	})
}

// TestStoreAtOnce: each goroutine has slots of its own, and reads any other's, too:
// that gives an error or something, and harms nobody.
func TestStoreAtOnce(t *testing.T) {
	stores(t, func(t *testing.T, st usageStore) {
		const hands, each, rounds = 4, 40, 1500
		var wg sync.WaitGroup
		for h := range uint32(hands) {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(h), 3))
				model := map[uint32][]byte{}
				got := make([]byte, pageSize)
				for range rounds {
					// Neighbours belong to different hands, so that what is punched is next to what is used.
					slot := r.Uint32N(each)*hands + h
					switch r.IntN(4) {
					case 0:
						st.Free(slot)
						delete(model, slot)
					case 1:
						p := somePage(r)
						if err := st.Write(slot, p); err != nil {
							t.Error(err)
							return
						}
						model[slot] = p
					case 2:
						_ = st.Read(r.Uint32N(each*hands), got)
					default:
						want, ok := model[slot]
						if err := st.Read(slot, got); ok != (err == nil) || ok && !bytes.Equal(got, want) {
							t.Errorf("slot %d: written %v, read: %v, same %v", slot, ok, err, bytes.Equal(got, want))
							return
						}
					}
				}
				for slot := range model {
					st.Free(slot)
				}
			})
		}
		wg.Wait()
		if u := st.Usage(); u.In != 0 {
			t.Errorf("%d bytes are left", u.In)
		}
	})
}

// TestStoreGivesBackMemory: what was freed is not held for long.
func TestStoreGivesBackMemory(t *testing.T) {
	stores(t, func(t *testing.T, st usageStore) {
		r := rand.New(rand.NewPCG(5, 6))
		const n = 8192
		p := make([]byte, pageSize)
		for slot := range uint32(n) {
			for i := range p[:2000] {
				p[i] = byte(r.Uint32())
			}
			if err := st.Write(slot, p); err != nil {
				t.Fatal(err)
			}
		}
		full := st.Usage()
		if full.In != n*pageSize || full.Held < n*2000 || full.Held > n*(pageSize+64) {
			t.Errorf("full: %+v", full)
		}
		for slot := range uint32(n) {
			if slot%2 == 0 {
				st.Free(slot)
			}
		}
		for slot := uint32(1); slot < n; slot += 2 {
			st.Free(slot)
		}
		if u := st.Usage(); u.In != 0 || u.Held > 4<<20 {
			t.Errorf("empty: %+v; it was %+v", u, full)
		}
	})
}

// TestStoreHoldsNothingForZeros: pages without content of their own cost nothing.
func TestStoreHoldsNothingForZeros(t *testing.T) {
	stores(t, func(t *testing.T, st usageStore) {
		p := make([]byte, pageSize)
		for slot := range uint32(1000) {
			if err := st.Write(slot, p); err != nil {
				t.Fatal(err)
			}
		}
		if u := st.Usage(); u.In != 1000*pageSize || u.Held != 0 {
			t.Errorf("%+v", u)
		}
	})
}

func TestStoreChecksItsArguments(t *testing.T) {
	stores(t, func(t *testing.T, st usageStore) {
		p := make([]byte, pageSize)
		for _, f := range []func(uint32, []byte) error{st.Write, st.Read} {
			if err := f(1<<28, p); !errors.Is(err, ErrInvalid) {
				t.Errorf("a slot that no page word can name: %v", err)
			}
			if err := f(0, p[:4095]); !errors.Is(err, ErrInvalid) {
				t.Errorf("less than a page: %v", err)
			}
		}
		st.Free(1 << 28)
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{st.Write(0, p), st.Read(0, p), st.Close()} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("after Close: %v", err)
			}
		}
		st.Free(0)
		if u := st.Usage(); u != (StoreUsage{}) {
			t.Errorf("after Close: %+v", u)
		}
	})
}

func TestFileStoreSaysThatThereIsNoRoom(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tapverbs", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("mount a tmpfs: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	st, err := NewFileStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	p := pattern(pageSize, 1)
	n := uint32(0)
	for ; err == nil && n < 1000; n++ {
		err = st.Write(n, p)
	}
	if n != 65 || !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), dir) {
		t.Fatalf("after %d pages: %v", n, err)
	}
	got := make([]byte, pageSize)
	for slot := range n - 1 {
		if err := st.Read(slot, got); err != nil || !bytes.Equal(got, p) {
			t.Fatalf("slot %d afterwards: %v", slot, err)
		}
	}
	if err := st.Read(n-1, got); !errors.Is(err, unix.ENOENT) {
		t.Errorf("the page that had no room: %v", err)
	}
	// What is freed is room again at once, though it may not have been punched yet.
	st.Free(7)
	if err := st.Write(n-1, p); err != nil {
		t.Errorf("after one was freed: %v", err)
	}
	st.Free(n - 1)
	if err := st.Write(n, make([]byte, pageSize)); err != nil {
		t.Errorf("zeros: %v", err)
	}
}

func TestFileStoreFindsOutWhatTheDiskLost(t *testing.T) {
	fd, err := temporary(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f, err := newFileStore(fd, "here")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make([]byte, pageSize)
	for _, c := range []struct {
		name  string
		spoil func() error
	}{
		{"one bit", func() error {
			_, err := unix.Pwrite(fd, []byte{0}, 3*pageSize+77)
			return err
		}},
		{"all of it", func() error {
			return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 3*pageSize, pageSize)
		}},
		{"the file's end", func() error { return unix.Ftruncate(fd, 3*pageSize+100) }},
	} {
		if err := f.Write(3, pattern(pageSize, 2)); err != nil {
			t.Fatal(err)
		}
		if err := f.Read(3, got); err != nil {
			t.Fatal(err)
		}
		if err := c.spoil(); err != nil {
			t.Fatal(err)
		}
		if err := f.Read(3, got); !errors.Is(err, unix.EIO) {
			t.Errorf("%s lost: %v", c.name, err)
		}
	}
}

// TestFileStoreHasNoName: neither way to make its file leaves anything in the
// directory, and programs that are started do not get it.
func TestFileStoreHasNoName(t *testing.T) {
	for name, open := range map[string]func(string) (int, error){"O_TMPFILE": temporary, "unlinked": named} {
		dir := t.TempDir()
		fd, err := open(dir)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d, err := os.ReadDir(dir); err != nil || len(d) != 0 {
			t.Errorf("%s: the directory has %v, %v", name, d, err)
		}
		if fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || fl&unix.FD_CLOEXEC == 0 {
			t.Errorf("%s: flags %#x, %v", name, fl, err)
		}
		st, err := newFileStore(fd, dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := st.Write(9, pattern(pageSize, 3)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
		if err := unix.Close(fd); err != unix.EBADF {
			t.Errorf("%s: the file is open after Close: %v", name, err)
		}
	}
	if _, err := NewFileStore("/nonexistent/dir"); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "/nonexistent/dir") {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// TestCompressedStoreCompresses, and holds little for what is left of much, wherever
// that lies.
func TestCompressedStoreCompresses(t *testing.T) {
	st, err := NewCompressedStore()
	if err != nil {
		t.Fatal(err)
	}
	c := st.(*compressedStore)
	defer c.Close()
	r := rand.New(rand.NewPCG(7, 8))
	const n = 20000
	p := make([]byte, pageSize)
	page := func(slot uint32) []byte {
		r := rand.New(rand.NewPCG(uint64(slot), 9))
		clear(p)
		for i := range p[:400+slot%1000] {
			p[i] = byte(r.Uint32())
		}
		return p
	}
	for slot := range uint32(n) {
		if err := c.Write(slot, page(slot)); err != nil {
			t.Fatal(err)
		}
	}
	full := c.Usage()
	if full.In != n*pageSize || full.Held > full.In/3 {
		t.Errorf("full: %+v", full)
	}
	// One of 20 is left, at random places.
	var left []uint32
	for slot := range uint32(n) {
		if r.IntN(20) == 0 {
			left = append(left, slot)
		} else {
			c.Free(slot)
		}
	}
	u := c.Usage()
	if u.In != uint64(len(left))*pageSize || u.Held > full.Held/20*2+32*64<<10 {
		t.Errorf("%d pages are left: %+v; full it was %+v", len(left), u, full)
	}
	got := make([]byte, pageSize)
	for _, slot := range left {
		if err := c.Read(slot, got); err != nil {
			t.Fatal(err)
		}
		same(t, "a page that was left", got, page(slot))
		c.Free(slot)
	}
	if u := c.Usage(); u != (StoreUsage{}) {
		t.Errorf("empty: %+v", u)
	}
	for i := range 1000 { // one word, not of zeros
		for k := range p {
			p[k] = byte(i) + byte(k%8) + 1
		}
		if err := c.Write(uint32(i), p); err != nil {
			t.Fatal(err)
		}
	}
	if u := c.Usage(); u.In != 1000*pageSize || u.Held != 0 {
		t.Errorf("pages of one word each: %+v", u)
	}
}

// FuzzCompressedStore: whatever the bytes, they come back.
func FuzzCompressedStore(f *testing.F) {
	f.Add([]byte("a page"), uint16(1))
	f.Add(pattern(pageSize, 1), uint16(0))
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0}, uint16(8))
	st, err := NewCompressedStore()
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = st.Close() })
	f.Fuzz(func(t *testing.T, b []byte, repeat uint16) {
		p, got := make([]byte, pageSize), make([]byte, pageSize)
		for i := 0; i < pageSize; i += max(int(repeat), 1) {
			copy(p[i:], b)
		}
		slot := uint32(len(b))
		if err := st.Write(slot, p); err != nil {
			t.Fatal(err)
		}
		if err := st.Read(slot, got); err != nil || !bytes.Equal(got, p) {
			t.Fatalf("it came back as something else, %v", err)
		}
	})
}

func BenchmarkStore(b *testing.B) {
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		b.Fatal(err)
	}
	for name, make1 := range map[string]func() (Store, error){
		"file":       func() (Store, error) { return NewFileStore(b.TempDir()) },
		"compressed": NewCompressedStore,
	} {
		st, err := make1()
		if err != nil {
			b.Fatal(err)
		}
		const n = 1024
		page := func(i int) []byte { return text[i%n*pageSize:][:pageSize] }
		b.Run(name+"/write", func(b *testing.B) {
			b.SetBytes(pageSize)
			for i := range b.N {
				if err := st.Write(uint32(i%n), page(i)); err != nil {
					b.Fatal(err)
				}
			}
			if b.N >= n {
				u := st.(usageStore).Usage()
				b.ReportMetric(float64(u.Held)/float64(u.In), "held/in")
			}
		})
		got := make([]byte, pageSize)
		b.Run(name+"/read", func(b *testing.B) {
			b.SetBytes(pageSize)
			for i := range n {
				if err := st.Write(uint32(i), page(i)); err != nil {
					b.Fatal(err)
				}
			}
			for i := 0; b.Loop(); i++ {
				if err := st.Read(uint32(i%n), got); err != nil {
					b.Fatal(err)
				}
			}
		})
		_ = st.Close()
	}
}
