// SPDX-License-Identifier: GPL-2.0-only
/*
 * The older way to offer a vGPU: each VF of a PF is a parent of at most one
 * mediated device, with a catalogue of types in mdev_supported_types.
 *
 *  VF	 mdev_supported_types/nvidia-<id>/ with the vendor's name, description,
 *	 device_api, and available_instances: 1, or 0 where the type doesn't fit
 *	 now, by the same rules as creatable_vgpu_types in gpu.c.
 *  mdev is a PCI device without any BAR, just enough for QEMU's vfio-pci, and
 *	 carries nvidia/vgpu_params.  The driver takes the last character of what
 *	 is written there for a newline.
 *
 * Creating what doesn't fit fails with errno_full or errno_mismatch.  The
 * kernel lets no driver refuse a removal: it waits until the device is closed,
 * and then for busy_ms, as a driver does that cleans up.
 */
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/jiffies.h>
#include <linux/mdev.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <linux/uaccess.h>
#include <linux/unaligned.h>
#include <linux/vfio.h>
#include <linux/vfio_pci_core.h>

#include "fakevgpu.h"

#define FV_CONFIG_SIZE	PCI_CFG_SPACE_SIZE
#define FV_PARAMS_SIZE	1024

struct fv_mdev_type {
	struct mdev_type mtype;
	const struct fv_type *type;
	char id[8];
};

/* a VF as a parent */
struct fv_parent {
	struct mdev_parent mparent;
	struct fv_mdev_type types[FV_TYPES];
	struct mdev_type *mtypes[FV_TYPES];
	struct fv_slot slot;
	struct pci_dev *pdev;
};

struct fv_mdev {
	struct vfio_device vdev;
	struct fv_parent *parent;
	u8 config[FV_CONFIG_SIZE];
	char params[FV_PARAMS_SIZE];
};

static struct fv_parent *fv_parent_of(struct mdev_type *mtype)
{
	return dev_get_drvdata(mtype->parent->dev);
}

/* --- the VFIO device --- */

static int fv_mdev_open(struct vfio_device *vdev)
{
	struct fv_mdev *mdev = container_of(vdev, struct fv_mdev, vdev);

	mutex_lock(&fv_lock);
	mdev->parent->slot.open = true;
	mutex_unlock(&fv_lock);
	dev_info(vdev->dev, "VFIO opened\n");
	return 0;
}

static void fv_mdev_close(struct vfio_device *vdev)
{
	struct fv_mdev *mdev = container_of(vdev, struct fv_mdev, vdev);

	mutex_lock(&fv_lock);
	mdev->parent->slot.open = false;
	mdev->parent->slot.closed = jiffies ? : 1;
	mutex_unlock(&fv_lock);
	dev_info(vdev->dev, "VFIO closed\n");
}

/* Is this a place in config space, and how much of @count lies in it? */
static ssize_t fv_in_config(size_t count, loff_t where)
{
	loff_t pos = where & VFIO_PCI_OFFSET_MASK;

	if (VFIO_PCI_OFFSET_TO_INDEX(where) != VFIO_PCI_CONFIG_REGION_INDEX ||
	    pos >= FV_CONFIG_SIZE)
		return -EINVAL;
	return min_t(loff_t, count, FV_CONFIG_SIZE - pos);
}

static ssize_t fv_mdev_read(struct vfio_device *vdev, char __user *buf,
			    size_t count, loff_t *ppos)
{
	struct fv_mdev *mdev = container_of(vdev, struct fv_mdev, vdev);
	ssize_t len = fv_in_config(count, *ppos);

	if (len < 0)
		return len;
	if (copy_to_user(buf, mdev->config + (*ppos & VFIO_PCI_OFFSET_MASK), len))
		return -EFAULT;
	*ppos += len;
	return len;
}

static ssize_t fv_mdev_write(struct vfio_device *vdev, const char __user *buf,
			     size_t count, loff_t *ppos)
{
	struct fv_mdev *mdev = container_of(vdev, struct fv_mdev, vdev);
	loff_t pos = *ppos & VFIO_PCI_OFFSET_MASK;
	ssize_t len = fv_in_config(count, *ppos), i;
	u8 bytes[8];

	if (len < 0)
		return len;
	len = min_t(ssize_t, len, sizeof(bytes));
	if (copy_from_user(bytes, buf, len))
		return -EFAULT;
	/* all else is read-only; BARs that stay 0 are BARs that aren't there */
	for (i = 0; i < len; i++)
		if (pos + i == PCI_COMMAND || pos + i == PCI_INTERRUPT_LINE)
			mdev->config[pos + i] = bytes[i];
	*ppos += len;
	return len;
}

static long fv_device_info(void __user *arg)
{
	struct vfio_device_info info;
	size_t size = offsetofend(struct vfio_device_info, num_irqs);

	if (copy_from_user(&info, arg, size))
		return -EFAULT;
	if (info.argsz < size)
		return -EINVAL;
	info.flags = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
	info.num_regions = VFIO_PCI_NUM_REGIONS;
	info.num_irqs = VFIO_PCI_NUM_IRQS;
	return copy_to_user(arg, &info, size) ? -EFAULT : 0;
}

static long fv_region_info(void __user *arg)
{
	struct vfio_region_info info;
	size_t size = offsetofend(struct vfio_region_info, offset);

	if (copy_from_user(&info, arg, size))
		return -EFAULT;
	if (info.argsz < size || info.index >= VFIO_PCI_NUM_REGIONS)
		return -EINVAL;
	info.offset = VFIO_PCI_INDEX_TO_OFFSET(info.index);
	info.cap_offset = 0;
	info.flags = 0;
	info.size = 0;
	if (info.index == VFIO_PCI_CONFIG_REGION_INDEX) {
		info.size = FV_CONFIG_SIZE;
		info.flags = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
	}
	return copy_to_user(arg, &info, size) ? -EFAULT : 0;
}

/* The device never interrupts. */
static long fv_irq_info(void __user *arg)
{
	struct vfio_irq_info info;
	size_t size = offsetofend(struct vfio_irq_info, count);

	if (copy_from_user(&info, arg, size))
		return -EFAULT;
	if (info.argsz < size || info.index >= VFIO_PCI_NUM_IRQS)
		return -EINVAL;
	info.flags = 0;
	info.count = 0;
	return copy_to_user(arg, &info, size) ? -EFAULT : 0;
}

static long fv_mdev_ioctl(struct vfio_device *vdev, unsigned int cmd,
			  unsigned long arg)
{
	switch (cmd) {
	case VFIO_DEVICE_GET_INFO:
		return fv_device_info((void __user *)arg);
	case VFIO_DEVICE_GET_REGION_INFO:
		return fv_region_info((void __user *)arg);
	case VFIO_DEVICE_GET_IRQ_INFO:
		return fv_irq_info((void __user *)arg);
	case VFIO_DEVICE_RESET:
		return 0;
	}
	return -ENOTTY;
}

static const struct vfio_device_ops fv_mdev_ops = {
	.name		= "nvidia-vgpu-mdev",
	.open_device	= fv_mdev_open,
	.close_device	= fv_mdev_close,
	.read		= fv_mdev_read,
	.write		= fv_mdev_write,
	.ioctl		= fv_mdev_ioctl,
	.bind_iommufd	= vfio_iommufd_emulated_bind,
	.unbind_iommufd	= vfio_iommufd_emulated_unbind,
	.attach_ioas	= vfio_iommufd_emulated_attach_ioas,
	.detach_ioas	= vfio_iommufd_emulated_detach_ioas,
};

static void fv_fill_config(u8 *config)
{
	put_unaligned_le16(FAKE_VENDOR, config + PCI_VENDOR_ID);
	put_unaligned_le16(FAKE_DEVICE, config + PCI_DEVICE_ID);
	put_unaligned_le16(PCI_CLASS_DISPLAY_3D, config + PCI_CLASS_DEVICE);
	put_unaligned_le16(FAKE_VENDOR, config + PCI_SUBSYSTEM_VENDOR_ID);
}

/* --- nvidia/vgpu_params --- */

static ssize_t vgpu_params_show(struct device *dev,
				struct device_attribute *attr, char *buf)
{
	struct fv_mdev *mdev = dev_get_drvdata(dev);
	ssize_t len;

	mutex_lock(&fv_lock);
	len = sysfs_emit(buf, "%s\n", mdev->params);
	mutex_unlock(&fv_lock);
	return len;
}

static ssize_t vgpu_params_store(struct device *dev, struct device_attribute *attr,
				 const char *buf, size_t count)
{
	struct fv_mdev *mdev = dev_get_drvdata(dev);
	int ret = 0;

	mutex_lock(&fv_lock);
	if (mdev->parent->slot.open && errno_in_use)
		ret = -errno_in_use;
	else if (count > sizeof(mdev->params))
		ret = -EINVAL;
	else
		/* with room for the end in place of the last character */
		strscpy(mdev->params, buf, count);
	mutex_unlock(&fv_lock);
	dev_info(dev, "vgpu_params <- %.*s: %d (%s[%d])\n", (int)count - 1, buf, ret,
		 current->comm, task_pid_nr(current));
	return ret ? ret : count;
}
static DEVICE_ATTR_RW(vgpu_params);

static struct attribute *fv_mdev_attrs[] = {
	&dev_attr_vgpu_params.attr,
	NULL
};

static const struct attribute_group fv_mdev_group = {
	.name = "nvidia",
	.attrs = fv_mdev_attrs,
};

static const struct attribute_group *fv_mdev_groups[] = {
	&fv_mdev_group,
	NULL
};

/* --- the life of an mdev --- */

static int fv_mdev_take(struct fv_parent *parent, const struct fv_type *type)
{
	int ret;

	mutex_lock(&fv_lock);
	ret = parent->slot.type ? -(errno_full ?: EIO) : fv_fits(parent->slot.pf, type);
	if (!ret) {
		if (write_ms)
			msleep(write_ms);
		parent->slot.type = type;
	}
	mutex_unlock(&fv_lock);
	return ret;
}

static void fv_mdev_give_back(struct fv_parent *parent)
{
	mutex_lock(&fv_lock);
	parent->slot.type = NULL;
	parent->slot.closed = 0;
	mutex_unlock(&fv_lock);
}

static int fv_mdev_create(struct mdev_device *mdev)
{
	struct fv_mdev_type *type = container_of(mdev->type, struct fv_mdev_type, mtype);
	struct fv_parent *parent = fv_parent_of(mdev->type);
	struct fv_mdev *fv;
	int ret = fv_mdev_take(parent, type->type);

	pci_info(parent->pdev, "mdev %s of type %u: %d (%s[%d])\n", dev_name(&mdev->dev),
		 type->type->id, ret, current->comm, task_pid_nr(current));
	if (ret)
		return ret;
	fv = vfio_alloc_device(fv_mdev, vdev, &mdev->dev, &fv_mdev_ops);
	if (IS_ERR(fv)) {
		ret = PTR_ERR(fv);
		goto give_back;
	}
	fv->parent = parent;
	fv_fill_config(fv->config);
	dev_set_drvdata(&mdev->dev, fv);
	ret = vfio_register_emulated_iommu_dev(&fv->vdev);
	if (ret)
		goto put;
	return 0;

put:
	vfio_put_device(&fv->vdev);
give_back:
	fv_mdev_give_back(parent);
	return ret;
}

static void fv_mdev_destroy(struct mdev_device *mdev)
{
	struct fv_mdev *fv = dev_get_drvdata(&mdev->dev);
	struct fv_parent *parent = fv->parent;
	unsigned int wait;

	vfio_unregister_group_dev(&fv->vdev);	/* waits until it is closed */
	mutex_lock(&fv_lock);
	wait = fv_busy_ms(&parent->slot);
	mutex_unlock(&fv_lock);
	if (wait)
		msleep(wait);
	vfio_put_device(&fv->vdev);
	fv_mdev_give_back(parent);
	pci_info(parent->pdev, "mdev %s removed after %u ms (%s[%d])\n", dev_name(&mdev->dev),
		 wait, current->comm, task_pid_nr(current));
}

static unsigned int fv_mdev_available(struct mdev_type *mtype)
{
	struct fv_mdev_type *type = container_of(mtype, struct fv_mdev_type, mtype);
	struct fv_parent *parent = fv_parent_of(mtype);
	bool fits;

	mutex_lock(&fv_lock);
	fits = !parent->slot.type && !fv_fits(parent->slot.pf, type->type);
	mutex_unlock(&fv_lock);
	return fits;
}

static ssize_t fv_mdev_describe(struct mdev_type *mtype, char *buf)
{
	const struct fv_type *type = container_of(mtype, struct fv_mdev_type, mtype)->type;

	return sysfs_emit(buf, "num_heads=4, frl_config=60, framebuffer=%uM, "
			  "max_resolution=7680x4320, max_instance=%u\n", type->fb, type->max);
}

static struct mdev_driver fv_mdev_driver = {
	.device_api = VFIO_DEVICE_API_PCI_STRING,
	.probe = fv_mdev_create,
	.remove = fv_mdev_destroy,
	.get_available = fv_mdev_available,
	.show_description = fv_mdev_describe,
	.driver = {
		.name = "nvidia-vgpu-mdev",
		.owner = THIS_MODULE,
		.mod_name = KBUILD_MODNAME,
		.dev_groups = fv_mdev_groups,
	},
};

int fv_mdev_probe(struct pci_dev *pdev, struct fv_pf *pf)
{
	struct fv_parent *parent;
	int i, ret;

	parent = kzalloc(sizeof(*parent), GFP_KERNEL);
	if (!parent)
		return -ENOMEM;
	parent->pdev = pdev;
	parent->slot.pf = pf;
	for (i = 0; i < FV_TYPES; i++) {
		struct fv_mdev_type *type = &parent->types[i];

		type->type = &fv_types[i];
		snprintf(type->id, sizeof(type->id), "%u", fv_types[i].id);
		type->mtype.sysfs_name = type->id;	/* after the driver's name and a dash */
		type->mtype.pretty_name = fv_types[i].name;
		parent->mtypes[i] = &type->mtype;
	}
	pci_set_drvdata(pdev, parent);
	mutex_lock(&fv_lock);
	list_add_tail(&parent->slot.node, &pf->slots);
	mutex_unlock(&fv_lock);
	ret = mdev_register_parent(&parent->mparent, &pdev->dev, &fv_mdev_driver,
				   parent->mtypes, FV_TYPES);
	if (ret) {
		mutex_lock(&fv_lock);
		list_del(&parent->slot.node);
		mutex_unlock(&fv_lock);
		kfree(parent);
	}
	return ret;
}

void fv_mdev_remove(struct pci_dev *pdev)
{
	struct fv_parent *parent = pci_get_drvdata(pdev);

	mdev_unregister_parent(&parent->mparent);
	mutex_lock(&fv_lock);
	list_del(&parent->slot.node);
	mutex_unlock(&fv_lock);
	kfree(parent);
}

int fv_mdev_init(void)
{
	return mdev_register_driver(&fv_mdev_driver);
}

void fv_mdev_exit(void)
{
	mdev_unregister_driver(&fv_mdev_driver);
}
