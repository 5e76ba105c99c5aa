/*
 * qemu_ksm.h: guest memory on QEMU's memory-backend-ksm
 *
 * What the QEMU driver needs beyond the XML (domain_memory_ksm.h): whether
 * a domain can be merged, the daemon of its group, the object's properties, its
 * statistics.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef QEMU_KSM_H
#define QEMU_KSM_H

#include "domain_conf.h"
#include "qemu_capabilities.h"
#include "qemu_domain.h"
#include "vircommand.h"
#include "virjson.h"
#include "virtypedparam.h"

/* Refuses domains that ask for merging and for something that excludes it. */
int qemuKsmValidateDomain(const virDomainDef *def, virQEMUCaps *qemuCaps);

/*
 * Connects to the daemon of the domain's group, if it has one: QEMU itself may
 * not have the right to.  Without a daemon the domain starts all the same.
 */
int qemuKsmPrepareHost(virDomainObj *vm);

/* Gives that connection to @cmd; before the first qemuKsmBackendProps(). */
void qemuKsmPassGroup(virCommand *cmd,
                      qemuDomainObjPrivate *priv);

/*
 * Adds the object's own properties to @props, the connection among them when it
 * is the first; @alias, @hugepages and @access are those of the cell or device
 * the memory is for.
 */
int qemuKsmBackendProps(virJSONValue **props,
                        qemuDomainObjPrivate *priv,
                        const virDomainDef *def,
                        const char *alias,
                        bool hugepages,
                        virDomainMemoryAccess access);

/*
 * Is guest memory the same in a migration stream, though the sources differ?
 * Merging is the host's affair: plain anonymous memory and merged memory are
 * one to the guest.
 */
bool qemuKsmSourcesMigratable(const virDomainDef *src,
                              const virDomainDef *dst);

/*
 * Adds memory.ksm.* of a running domain; needs a job, enters the monitor.
 * Adds nothing where QEMU has nothing to say.
 */
void qemuKsmGetStats(virDomainObj *vm,
                     virTypedParamList *params);

#endif /* QEMU_KSM_H */
