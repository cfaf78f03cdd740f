// SPDX-License-Identifier: Apache-2.0

package mr

import "runtime/debug"

// Memory is lent to a packet that waits to be sent: Lend makes it present, and when the
// packet leaves, View says where it is, within a section that lasts until the kernel has
// read it. In between nothing holds it, and what happens to it costs the packet.

// viewTries is how often View brings in pages before it gives up.
const viewTries = 16

// Lend makes n bytes at iova of a region present, so that View finds them; Check has been
// asked. false: the region has no memory to look at, and is to be read. Errors as for Read.
func (a *Accessor) Lend(r *Region, iova, n uint64) (bool, error) {
	if r.paging == NullMemory {
		return false, nil
	}
	var wait waiter
	for n > 0 {
		done, err := a.lendSome(r, iova, int(n))
		if err != nil {
			if err = a.again(r, err, &wait); err == nil {
				continue
			}
			return false, a.s.suspectFault(r, iova, int(n), false, err)
		}
		n, iova = n-uint64(done), iova+uint64(done)
	}
	return true, nil
}

// LendOf is Lend of the first n bytes of all, which are wanted soon: see ReadOf.
func (a *Accessor) LendOf(r *Region, iova, all, n uint64) (bool, error) {
	a.rest = r.va(iova) + all
	ok, err := a.Lend(r, iova, n)
	a.rest = 0
	return ok, err
}

func (a *Accessor) lendSome(r *Region, iova uint64, n int) (int, error) {
	a.enter()
	va := r.va(iova)
	n, present, err := a.run(r, va, n)
	if err == nil && !present {
		n, err = 0, a.bringIn(r, va, n)
	}
	a.exit()
	return n, err
}

// Open opens a section, for View. It must be closed soon by Shut, and nothing but View and
// Guard be called of this package, nor anything be waited for, in between.
func (a *Accessor) Open() { a.enter() }

// Shut closes what Open has opened, and what lingers until the next access.
func (a *Accessor) Shut() { a.close() }

// View is the n bytes at iova of a region that were lent, until Shut; an error if they are
// not to be had now. They may be touched in Guard alone.
func (a *Accessor) View(r *Region, iova uint64, n int) ([]byte, error) {
	va := r.va(iova)
	for done, tries := 0, 0; done < n; {
		k, present, err := a.run(r, va+uint64(done), n-done)
		if err != nil {
			return nil, err
		}
		if present {
			done += k
			continue
		}
		if tries++; tries > viewTries {
			return nil, ErrBusy
		}
		if err := a.bringIn(r, va+uint64(done), k); err != nil {
			return nil, err
		}
	}
	return memory(va, n), nil
}

// Guard calls f, which touches memory of regions, and ends it with ErrFault where that
// memory is not there (see guardedCopy).
func Guard(f func()) (err error) {
	old := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(old)
		if e := recover(); e != nil {
			err = faultError(e)
		}
	}()
	f()
	return nil
}
