/* SPDX-License-Identifier: GPL-2.0-only */
/* fakevgpu: what the two ways to offer a vGPU share; see gpu.c */
#ifndef FAKEVGPU_H
#define FAKEVGPU_H

#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>

#define FAKE_VENDOR	0x10de
#define FAKE_DEVICE	0x2235

struct fv_type {
	unsigned int id;
	unsigned int fb;	/* MiB */
	unsigned int max;	/* instances on one PF */
	const char *name;
};

#define FV_TYPES	12
extern const struct fv_type fv_types[FV_TYPES];

struct fv_pf {
	struct list_head node;
	struct list_head slots;	/* of its VFs */
	struct pci_dev *pdev;
	bool mdev;		/* whether its VFs are parents of mdevs */
};

/* What a VF holds of its PF. */
struct fv_slot {
	struct list_head node;
	struct fv_pf *pf;
	const struct fv_type *type;
	bool open;
	unsigned long closed;	/* jiffies; 0: never open so far */
};

/* One lock for everything: this is a test double, not a fast path. */
extern struct mutex fv_lock;
extern unsigned int busy_ms;
extern unsigned int write_ms;
extern int errno_in_use;
extern int errno_full;

/* Can @type be put on one more VF of @pf? 0 or an errno, negative. */
int fv_fits(struct fv_pf *pf, const struct fv_type *type);
/* How long the vendor's helper still has the slot after its last close. */
unsigned int fv_busy_ms(const struct fv_slot *slot);

int fv_mdev_init(void);
void fv_mdev_exit(void);
int fv_mdev_probe(struct pci_dev *pdev, struct fv_pf *pf);
void fv_mdev_remove(struct pci_dev *pdev);

#endif
