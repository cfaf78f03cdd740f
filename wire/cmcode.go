// SPDX-License-Identifier: Apache-2.0

package wire

// The encodings of CM messages: offsets are those of the tables in IBA 12.6 to 12.11, from
// the end of the MAD header.

func get24(b []byte) uint32 { return be.Uint32(b) >> 8 }

// put24 writes 24 bits and the eight that share their word.
func put24(b []byte, v uint32, low uint8) { be.PutUint32(b, v<<8|uint32(low)) }

func bit(on bool, n uint) uint8 {
	if on {
		return 1 << n
	}
	return 0
}

// put writes the 44 bytes that a REQ has of a path. LAP's differ in where the rate and the
// traffic class are.
func (p *CMPath) put(b []byte, lap bool) {
	be.PutUint16(b, p.LocalLID)
	be.PutUint16(b[2:], p.RemoteLID)
	copy(b[4:20], p.LocalGID[:])
	copy(b[20:36], p.RemoteGID[:])
	if lap {
		be.PutUint32(b[36:], p.FlowLabel<<12|uint32(p.TrafficClass))
		b[40], b[41] = p.HopLimit, p.Rate&0x3f
	} else {
		be.PutUint32(b[36:], p.FlowLabel<<12|uint32(p.Rate&0x3f))
		b[40], b[41] = p.TrafficClass, p.HopLimit
	}
	b[42], b[43] = p.SL<<4|bit(p.SubnetLocal, 3), p.AckTimeout<<3
}

func (p *CMPath) parse(b []byte, lap bool) {
	*p = CMPath{LocalLID: be.Uint16(b), RemoteLID: be.Uint16(b[2:]), LocalGID: [16]byte(b[4:]), RemoteGID: [16]byte(b[20:]),
		FlowLabel: be.Uint32(b[36:]) >> 12, SL: b[42] >> 4, SubnetLocal: b[42]>>3&1 != 0, AckTimeout: b[43] >> 3}
	if lap {
		p.TrafficClass, p.HopLimit, p.Rate = b[39], b[40], b[41]&0x3f
	} else {
		p.Rate, p.TrafficClass, p.HopLimit = b[39]&0x3f, b[40], b[41]
	}
}

// Put writes the message to b[:CMLen].
func (m *CMReq) Put(b []byte) {
	clear(b[:CMLen])
	be.PutUint32(b, m.LocalID)
	be.PutUint32(b[4:], m.VendorID&0xffffff)
	be.PutUint64(b[8:], m.ServiceID)
	be.PutUint64(b[16:], m.LocalCAGUID)
	be.PutUint32(b[28:], m.LocalQKey)
	put24(b[32:], uint32(m.LocalQPN), m.ResponderResources)
	put24(b[36:], m.LocalEECN, m.InitiatorDepth)
	put24(b[40:], m.RemoteEECN, m.RemoteTimeout<<3|m.Transport&3<<1|bit(m.FlowControl, 0))
	put24(b[44:], uint32(m.StartingPSN), m.LocalTimeout<<3|m.RetryCount&7)
	be.PutUint16(b[48:], m.PKey)
	b[50] = m.MTU<<4 | bit(m.RDCExists, 3) | m.RNRRetry&7
	b[51] = m.MaxCMRetries<<4 | bit(m.SRQ, 3) | m.ExtTransport&7
	m.Primary.put(b[52:], false)
	m.Alternate.put(b[96:], false)
	copy(b[140:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMReq) Parse(b []byte) {
	*m = CMReq{
		LocalID: be.Uint32(b), VendorID: be.Uint32(b[4:]) & 0xffffff, ServiceID: be.Uint64(b[8:]), LocalCAGUID: be.Uint64(b[16:]), LocalQKey: be.Uint32(b[28:]),
		LocalQPN: QPN(get24(b[32:])), ResponderResources: b[35],
		LocalEECN: get24(b[36:]), InitiatorDepth: b[39],
		RemoteEECN: get24(b[40:]), RemoteTimeout: b[43] >> 3, Transport: b[43] >> 1 & 3, FlowControl: b[43]&1 != 0,
		StartingPSN: PSN(get24(b[44:])), LocalTimeout: b[47] >> 3, RetryCount: b[47] & 7,
		PKey: be.Uint16(b[48:]), MTU: b[50] >> 4, RDCExists: b[50]>>3&1 != 0, RNRRetry: b[50] & 7,
		MaxCMRetries: b[51] >> 4, SRQ: b[51]>>3&1 != 0, ExtTransport: b[51] & 7,
		Private: [REQPrivateLen]byte(b[140:]),
	}
	m.Primary.parse(b[52:], false)
	m.Alternate.parse(b[96:], false)
}

// ids are the communication IDs that all messages between two ends begin with.
func putIDs(b []byte, local, remote uint32) {
	clear(b[:CMLen])
	be.PutUint32(b, local)
	be.PutUint32(b[4:], remote)
}

// Put writes the message to b[:CMLen].
func (m *CMMra) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	b[8], b[9] = m.Of<<6, m.ServiceTimeout<<3
	copy(b[10:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMMra) Parse(b []byte) {
	*m = CMMra{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), Of: b[8] >> 6, ServiceTimeout: b[9] >> 3,
		Private: [MRAPrivateLen]byte(b[10:])}
}

// Put writes the message to b[:CMLen].
func (m *CMRej) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	b[8], b[9] = m.Of<<6, m.InfoLen<<1
	be.PutUint16(b[10:], uint16(m.Reason))
	copy(b[12:84], m.Info[:])
	copy(b[84:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMRej) Parse(b []byte) {
	*m = CMRej{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), Of: b[8] >> 6, InfoLen: b[9] >> 1, Reason: CMReason(be.Uint16(b[10:])),
		Info: [CMInfoLen]byte(b[12:]), Private: [REJPrivateLen]byte(b[84:])}
}

// Put writes the message to b[:CMLen].
func (m *CMRep) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	be.PutUint32(b[8:], m.LocalQKey)
	put24(b[12:], uint32(m.LocalQPN), uint8(m.VendorID>>16))
	put24(b[16:], m.LocalEECN, uint8(m.VendorID>>8))
	put24(b[20:], uint32(m.StartingPSN), uint8(m.VendorID))
	b[24], b[25] = m.ResponderResources, m.InitiatorDepth
	b[26] = m.TargetAckDelay<<3 | m.Failover&3<<1 | bit(m.FlowControl, 0)
	b[27] = m.RNRRetry<<5 | bit(m.SRQ, 4)
	be.PutUint64(b[28:], m.LocalCAGUID)
	copy(b[36:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMRep) Parse(b []byte) {
	*m = CMRep{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), LocalQKey: be.Uint32(b[8:]), LocalQPN: QPN(get24(b[12:])),
		LocalEECN: get24(b[16:]), StartingPSN: PSN(get24(b[20:])), ResponderResources: b[24], InitiatorDepth: b[25],
		TargetAckDelay: b[26] >> 3, Failover: b[26] >> 1 & 3, FlowControl: b[26]&1 != 0, RNRRetry: b[27] >> 5, SRQ: b[27]>>4&1 != 0,
		LocalCAGUID: be.Uint64(b[28:]), VendorID: uint32(b[15])<<16 | uint32(b[19])<<8 | uint32(b[23]), Private: [REPPrivateLen]byte(b[36:])}
}

// Put writes the message to b[:CMLen].
func (m *CMRtu) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	copy(b[8:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMRtu) Parse(b []byte) {
	*m = CMRtu{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), Private: [RTUPrivateLen]byte(b[8:])}
}

// Put writes the message to b[:CMLen].
func (m *CMDreq) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	put24(b[8:], uint32(m.RemoteQPN), 0)
	copy(b[12:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMDreq) Parse(b []byte) {
	*m = CMDreq{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), RemoteQPN: QPN(get24(b[8:])), Private: [DREQPrivateLen]byte(b[12:])}
}

// Put writes the message to b[:CMLen].
func (m *CMDrep) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	copy(b[8:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMDrep) Parse(b []byte) {
	*m = CMDrep{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), Private: [DREPPrivateLen]byte(b[8:])}
}

// Put writes the message to b[:CMLen].
func (m *CMLap) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	put24(b[12:], uint32(m.RemoteQPN), m.RemoteTimeout<<3)
	m.Alternate.put(b[20:], true)
	copy(b[64:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMLap) Parse(b []byte) {
	*m = CMLap{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), RemoteQPN: QPN(get24(b[12:])), RemoteTimeout: b[15] >> 3,
		Private: [LAPPrivateLen]byte(b[64:])}
	m.Alternate.parse(b[20:], true)
}

// Put writes the message to b[:CMLen].
func (m *CMApr) Put(b []byte) {
	putIDs(b, m.LocalID, m.RemoteID)
	b[8], b[9] = m.InfoLen, m.Status
	copy(b[12:84], m.Info[:])
	copy(b[84:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMApr) Parse(b []byte) {
	*m = CMApr{LocalID: be.Uint32(b), RemoteID: be.Uint32(b[4:]), InfoLen: b[8], Status: b[9], Info: [CMInfoLen]byte(b[12:]),
		Private: [APRPrivateLen]byte(b[84:])}
}

// Put writes the message to b[:CMLen].
func (m *CMSidrReq) Put(b []byte) {
	clear(b[:CMLen])
	be.PutUint32(b, m.RequestID)
	be.PutUint16(b[4:], m.PKey)
	be.PutUint64(b[8:], m.ServiceID)
	copy(b[16:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMSidrReq) Parse(b []byte) {
	*m = CMSidrReq{RequestID: be.Uint32(b), PKey: be.Uint16(b[4:]), ServiceID: be.Uint64(b[8:]), Private: [SIDRREQPrivateLen]byte(b[16:])}
}

// Put writes the message to b[:CMLen].
func (m *CMSidrRep) Put(b []byte) {
	clear(b[:CMLen])
	be.PutUint32(b, m.RequestID)
	b[4], b[5] = m.Status, m.InfoLen
	put24(b[8:], uint32(m.QPN), 0)
	be.PutUint64(b[12:], m.ServiceID)
	be.PutUint32(b[20:], m.QKey)
	copy(b[24:96], m.Info[:])
	copy(b[96:CMLen], m.Private[:])
}

// Parse takes the message from b[:CMLen].
func (m *CMSidrRep) Parse(b []byte) {
	*m = CMSidrRep{RequestID: be.Uint32(b), Status: b[4], InfoLen: b[5], QPN: QPN(get24(b[8:])), ServiceID: be.Uint64(b[12:]),
		QKey: be.Uint32(b[20:]), Info: [CMInfoLen]byte(b[24:]), Private: [SIDRREPPrivateLen]byte(b[96:])}
}
