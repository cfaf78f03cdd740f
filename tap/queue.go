// SPDX-License-Identifier: Apache-2.0

package tap

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Queue is implemented by devices that know how many frames their port holds for its
// reader; what exceeds that is lost.
type Queue interface {
	// QueueLen is how many frames each queue of the port holds, super-frames counted as one
	// (tx_queue_len); 0 if that can not be asked, as of a netdev in another network namespace.
	QueueLen() int
	// SetQueueLen changes it, for all queues of the port, from now on and beyond Close if the
	// TAP is persistent. It needs CAP_NET_ADMIN: ErrPermission.
	SetQueueLen(n int) error
}

var _ Queue = (*dev)(nil)

// queueReq is a request about the netdev, by the name that it has now.
func (d *dev) queueReq() (*unix.Ifreq, error) {
	name, err := d.netdev("queue of")
	if err != nil {
		return nil, err
	}
	if d.mtu != 0 {
		return nil, fmt.Errorf("queue of %s: it is in another network namespace", d.name)
	}
	return unix.NewIfreq(name)
}

// QueueLen implements Queue.
func (d *dev) QueueLen() int {
	req, err := d.queueReq()
	if err != nil || unix.IoctlIfreq(d.ctl, unix.SIOCGIFTXQLEN, req) != nil {
		return 0
	}
	return int(req.Uint32())
}

// SetQueueLen implements Queue.
func (d *dev) SetQueueLen(n int) error {
	req, err := d.queueReq()
	if err != nil {
		return err
	}
	req.SetUint32(uint32(n))
	if err := unix.IoctlIfreq(d.ctl, unix.SIOCSIFTXQLEN, req); err != nil {
		return explain(fmt.Sprintf("set the queue length to %d of tap", n), d.name, err)
	}
	return nil
}
