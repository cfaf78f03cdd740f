// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Config says what to open.
type Config struct {
	// Name of the TAP, 1 to 15 bytes. One that does not exist is created, which
	// needs CAP_NET_ADMIN in the network namespace. With "" or a name that holds
	// "%d" the kernel chooses the number; ask Device.Name for the outcome.
	Name string
	// Plain opens without a vnet header, through songgao/water.
	Plain bool
	// Queues above 1 attaches to one queue of a multi-queue TAP (IFF_MULTI_QUEUE);
	// each further Open of the same name attaches the next. See OpenQueues.
	Queues int
	// MTU in bytes is set on the netdev if not 0, which needs CAP_NET_ADMIN.
	MTU int
	// Without names offloads not to ask for, such as USO4|USO6 for a reader whose
	// buffers cannot hold super-frames. Leaving out one of USO4 and USO6
	// leaves out both, as the kernel takes them together only.
	Without Offload
}

// Open attaches to the TAP cfg.Name in the network namespace of the calling
// thread. It does not bring the link up; if that is up already, it waits (up to a
// second, as a rule some microseconds) until frames pass. Errors are ErrNoTUN, ErrPermission,
// ErrBusy, ErrName, ErrNotTAP, or what the kernel said, with the remedy in words.
// An error to negotiate a vnet header is an error: whoever wants plain frames
// instead asks for them.
func Open(cfg Config) (Device, error) {
	if err := checkName(cfg.Name); err != nil {
		return nil, err
	}
	var (
		d   *dev
		err error
	)
	if cfg.Plain {
		d, err = openPlain(cfg)
	} else {
		d, err = openVnet(cfg)
	}
	if err != nil {
		return nil, err
	}
	if cfg.MTU != 0 {
		if err := d.setMTU(cfg.MTU); err != nil {
			d.Close()
			return nil, err
		}
	}
	d.awaitLink()
	return d, nil
}

// OpenPlain is Open without a vnet header.
func OpenPlain(name string) (Device, error) { return Open(Config{Name: name, Plain: true}) }

// OpenVnet is Open with a vnet header and every offload the kernel has.
func OpenVnet(name string) (Device, error) { return Open(Config{Name: name}) }

// OpenQueues opens cfg.Queues queues (at least 1) of one TAP, each a Device of its
// own with the same name. The kernel spreads incoming flows over them; see Steerer. Of a TAP
// made for several queues one can be opened, too. The kernel lets anybody attach to such
// a TAP again, and would give each a share of the frames; among callers of OpenQueues
// the second gets ErrBusy. Other errors are those of Open, and ErrNotTAP for several queues
// of a TAP that was made for one.
func OpenQueues(cfg Config) ([]Device, error) {
	n := max(cfg.Queues, 1)
	if n == 1 {
		d, err := Open(cfg)
		if err == nil {
			return []Device{d}, nil
		}
		if !errors.Is(err, ErrNotTAP) {
			return nil, err
		}
		cfg.Queues = 2 // so that it is opened as one of several
		if ds, err2 := openQueues(cfg, 1); err2 == nil || errors.Is(err2, ErrBusy) {
			return ds, err2
		}
		return nil, err
	}
	return openQueues(cfg, n)
}

// openQueues opens n queues of a TAP of several.
func openQueues(cfg Config, n int) (ds []Device, err error) {
	// Before a queue of somebody else's port takes frames away from him.
	claim := -1
	if cfg.Name != "" && !strings.Contains(cfg.Name, "%") {
		if claim, err = claimPort(cfg.Name); err != nil {
			return nil, err
		}
	}
	for len(ds) < n && err == nil {
		var d Device
		if d, err = Open(cfg); err == nil {
			ds = append(ds, d)
			cfg.Name, cfg.MTU = d.Name(), 0
			if claim < 0 {
				claim, err = claimPort(cfg.Name)
			}
		}
	}
	if err != nil {
		for _, d := range ds {
			d.Close()
		}
		if claim >= 0 {
			unix.Close(claim)
		}
		return nil, err
	}
	ds[0].(*dev).claim = claim
	return ds, nil
}

// claimPort takes an abstract socket address that stands for the port in its network
// namespace (unix(7)); it is free again when the socket is closed.
func claimPort(name string) (int, error) {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open tap %q: %w", name, err)
	}
	switch err = unix.Bind(s, &unix.SockaddrUnix{Name: "@tapverbs/port/" + name}); err {
	case nil:
		return s, nil
	case unix.EADDRINUSE:
		err = explain("open tap", name, unix.EBUSY)
	default:
		err = fmt.Errorf("open tap %q: claim it: %w", name, err)
	}
	unix.Close(s)
	return -1, err
}

// checkName refuses what the kernel's dev_valid_name would, before any descriptor
// is open.
func checkName(name string) error {
	switch {
	case name == "": // the kernel chooses
		return nil
	case len(name) > maxName:
		return fmt.Errorf("open tap %q: %w: %d bytes, at most %d", name, ErrName, len(name), maxName)
	case name == "." || name == ".." || strings.ContainsAny(name, "/: \t\n\v\f\r\x00"):
		return fmt.Errorf("open tap %q: %w: white space, '/' and ':' are not allowed", name, ErrName)
	}
	return nil
}

// maxName is IFNAMSIZ without the terminating zero, in bytes.
const maxName = 15
