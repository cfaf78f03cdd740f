// SPDX-License-Identifier: Apache-2.0

package qp

// moderation holds a CQ's events back until several completions have come, or some
// time has passed. It is guarded by the CQ's emu.
type moderation struct {
	count  uint32 // completions; 0: any number
	period int64  // ns; 0: no moderation
	held   uint32 // completions whose event is held back
	due    int64  // when it is given at the latest; Never: none is held back
	// later has Expire called at a time, in ns of the engine's clock.
	later func(at int64)
}

// Moderate holds events back (ibv_modify_cq(3)): one that is armed for comes when
// count completions have arrived that would have given it, or a time of period ns
// has passed since the first of them. count 0 stands for any number; with a period
// of 0 or a count of 1 events come at once, as they do in the beginning. later is
// called with the baton held to have Expire called at a time. The caller has the
// baton.
func (c *CQ) Moderate(count uint32, period int64, later func(at int64)) {
	if count == 1 {
		period = 0
	}
	c.emu.Lock()
	m := &c.mod
	m.count, m.period, m.later = count, period, later
	due := m.due
	c.emu.Unlock()
	if due != Never && period == 0 {
		c.Expire()
	}
}

// moderate says whether an event may be given now for a completion that would give
// one, and otherwise since when somebody must look after it; Never if somebody does.
func (m *moderation) moderate(now int64) (give bool, at int64) {
	if m.period == 0 {
		return true, Never
	}
	m.held++
	if m.count != 0 && m.held >= m.count {
		m.held, m.due = 0, Never
		return true, Never
	}
	if m.due == Never {
		m.due = now + m.period
		return false, m.due
	}
	return false, Never
}

// Due is when Expire is to be called, in ns of the engine's clock; Never if not.
func (c *CQ) Due() int64 {
	c.emu.Lock()
	defer c.emu.Unlock()
	return c.mod.due
}

// Expire gives the event that is held back. The caller has the baton.
func (c *CQ) Expire() {
	c.emu.Lock()
	held := c.mod.due != Never && !c.closed
	c.mod.held, c.mod.due = 0, Never
	fire, solicited := false, false
	if held {
		arm := c.ring.word(ringArm)
		a := arm.Load()
		solicited = a == ArmSolicited
		fire = a != ArmNone && arm.CompareAndSwap(a, ArmNone)
	}
	c.emu.Unlock()
	if fire && c.notify != nil {
		c.notify(solicited)
	}
}

// IgnoreOverrun has completions that find no room dropped, and nothing else happen
// (IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN): the program has seen to it that there is room.
func (c *CQ) IgnoreOverrun() {
	c.emu.Lock()
	c.lossy = true
	c.emu.Unlock()
}
